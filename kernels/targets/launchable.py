"""What Inductor must be told so that every kernel it makes can be launched from its machine code alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LAUNCHABLE: Final[Mapping[str, object]] = {
    "triton.cudagraphs": False,  # Capturing is the caller's.
    # Names made of all operators fused: Triton cuts a file name at 150 characters, and then the static
    # launcher finds none.
    "triton.descriptive_names": False,
    # The host may have no compiler: every kernel must be one that a binary alone can launch.
    "use_static_triton_launcher": True,
    "use_static_cuda_launcher": True,  # as it is called up to 2.11
    "strict_static_triton_launcher": True,
    "strict_static_cuda_launcher": True,
    "static_launch_user_defined_triton_kernels": True,
}


def known_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return those entries of `config` that the installed torch's Inductor has."""
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    return {name: value for name, value in config.items() if name in known}
