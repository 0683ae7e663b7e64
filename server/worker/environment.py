"""What the processes below the daemon see of its environment."""

from __future__ import annotations

from collections.abc import Mapping

# Nothing that changes generated code may come in unseen by the key (TORCHINDUCTOR_*, TORCH_*, TRITON_*), and
# no secret has business there.
ENVIRONMENT_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PYTHONSAFEPATH",
    "CUDA_HOME", "CUDA_PATH", "CXX", "CC", "VIRTUAL_ENV", "SSL_CERT_FILE",
})  # fmt: skip


def workers_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what they get of `environment`."""
    return {name: value for name, value in environment.items() if name in ENVIRONMENT_NAMES}
