from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fuse_cache.proto.toolchain import Toolchain, ToolchainError, installed_toolchain, local_toolchain

TORCH = "2.13.0+cpu"
RECORD = f"""torch/__init__.py,sha256=aaa,10
torch/version.py,sha256=bbb,20
torch/lib/libtorch.so,sha256=ccc,30
torch-{TORCH}.dist-info/METADATA,sha256=ddd,40
"""


def install(
    site: Path,
    *,
    extra: str = "",
    record: str = RECORD,
    cuda: str = "None",
    version: str = TORCH,
    triton: str = "",
) -> Toolchain:
    """Lay out what pip would, and return the toolchain found there."""
    for name, wheel_version, rows in (
        ("torch", version, record),
        ("triton", triton, "triton/__init__.py,sha256=e,1\n"),
    ):
        if not wheel_version:
            continue
        info = site / f"{name}-{wheel_version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {wheel_version}\n")
        (info / "RECORD").write_text(rows + extra)
        (site / name).mkdir(exist_ok=True)
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    if triton:
        (site / "triton" / "__init__.py").write_text(f"__version__ = '{triton}'\n")
    return installed_toolchain((str(site),))


def test_two_installs_of_one_wheel_agree(tmp_path: Path) -> None:
    plain = install(tmp_path / "a")
    notes = (
        f"torch-{TORCH}.dist-info/INSTALLER,sha256=x,4\n"
        f"torch-{TORCH}.dist-info/REQUESTED,sha256=x,0\n"
        f"torch-{TORCH}.dist-info/direct_url.json,sha256=x,90\n"
        f"torch-{TORCH}.dist-info/uv_cache.json,sha256=x,90\n"
        f"torch-{TORCH}.dist-info/RECORD,,\n"
        "torch/__pycache__/__init__.cpython-311.pyc,,\n"
        "../../../bin/torchrun,sha256=y,235\n"
    )
    reordered = "".join(sorted(RECORD.splitlines(keepends=True), reverse=True))
    assert install(tmp_path / "b", extra=notes, record=reordered) == plain


@pytest.mark.parametrize(
    "record",
    [
        RECORD.replace("ccc", "ccd"),
        RECORD + "torch/new.py,sha256=x,1\n",
        RECORD.replace("torch/lib/libtorch.so,sha256=ccc,30\n", ""),
        RECORD.replace("ddd", "dde"),
    ],
    ids=["changed", "added", "removed", "metadata"],
)
def test_another_build_of_the_same_version_is_another_toolchain(tmp_path: Path, record: str) -> None:
    host, builder = install(tmp_path / "a"), install(tmp_path / "b", record=record)
    assert host.torch == builder.torch
    assert host.torch_fingerprint != builder.torch_fingerprint
    reason = host.compatible_with(builder)
    assert reason is not None
    assert "another build of torch" in reason


def test_a_version_file_swapped_in_place_shows_at_once(tmp_path: Path) -> None:
    before = install(tmp_path)
    assert installed_toolchain((str(tmp_path),)) == before
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{TORCH}'\ncuda: Optional[str] = '13.0'\n")
    after = installed_toolchain((str(tmp_path),))
    assert after.torch_fingerprint != before.torch_fingerprint
    assert after.cuda == "13.0"


def test_an_upgrade_in_place_shows_at_once(tmp_path: Path) -> None:
    before = install(tmp_path)
    (tmp_path / f"torch-{TORCH}.dist-info" / "RECORD").write_text(RECORD.replace("aaa", "aab"))
    assert installed_toolchain((str(tmp_path),)).torch_fingerprint != before.torch_fingerprint


def test_the_cuda_version_is_known_without_importing_torch(tmp_path: Path) -> None:
    assert install(tmp_path / "a").cuda == ""
    assert install(tmp_path / "b", version="2.13.0+cu130", cuda="'13.0'").cuda == "13.0"


def test_the_version_is_what_torch_says_of_itself_whatever_pip_calls_the_wheel(tmp_path: Path) -> None:
    install(tmp_path, version="2.11.0", triton="3.6.0")
    version_file = tmp_path / "torch" / "version.py"
    version_file.write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    found = installed_toolchain((str(tmp_path),))
    assert (found.torch, found.triton, found.cuda) == ("2.11.0+cu130", "3.6.0", "13.0")
    version_file.write_text("")
    assert installed_toolchain((str(tmp_path),)).torch == "2.11.0"


def test_torch_that_is_missing_or_not_from_a_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="not installed"):
        installed_toolchain((str(tmp_path),))
    install(tmp_path)
    (tmp_path / f"torch-{TORCH}.dist-info" / "RECORD").unlink()
    with pytest.raises(ToolchainError, match="wheel"):
        installed_toolchain((str(tmp_path),))


HOST = Toolchain(
    python="3.11",
    torch="2.13.0+cpu",
    triton="3.7.1",
    torch_fingerprint=b"t" * 32,
    triton_fingerprint=b"r" * 32,
)


@pytest.mark.parametrize(
    ("change", "target", "names"),
    [
        ({}, "cpu-avx2", None),
        ({}, "sm_90", None),
        ({"python": "3.12"}, "cpu-avx2", ("3.12", "3.11")),
        ({"torch": "2.11.0+cpu"}, "cpu-avx2", ("2.11.0+cpu", "2.13.0+cpu")),
        ({"torch": "2.13.0+cu130"}, "cpu-avx2", ("2.13.0+cu130", "2.13.0+cpu")),
        ({"torch_fingerprint": b"x" * 32}, "cpu-avx2", ("78787878", "74747474")),
        ({"triton": "3.6.0"}, "cpu-avx2", None),
        ({"triton": "3.6.0"}, "sm_90", ("3.6.0", "3.7.1")),
        ({"triton": "", "triton_fingerprint": b""}, "sm_90", ("(none)", "3.7.1")),
        ({"triton_fingerprint": b"x" * 32}, "sm_90", ("another build of triton",)),
        ({"cuda": "13.0"}, "sm_90", None),
    ],
)
def test_a_refusal_names_both_sides(
    change: dict[str, object], target: str, names: tuple[str, ...] | None
) -> None:
    reason = HOST.compatible_with(dataclasses.replace(HOST, **change), target=target)  # type: ignore[arg-type]
    if names is None:
        assert reason is None
    else:
        assert reason is not None
        assert all(name in reason for name in names)


def test_another_wheel_of_the_same_version_is_taken_only_when_asked_for() -> None:
    builder = dataclasses.replace(HOST, torch="2.13.0+cu130", torch_fingerprint=b"x" * 32, cuda="13.0")
    assert HOST.compatible_with(builder, any_wheel=True) is None
    older = dataclasses.replace(builder, torch="2.12.0+cu130")
    assert HOST.compatible_with(older, any_wheel=True) is not None
    rebuilt = dataclasses.replace(HOST, torch_fingerprint=b"x" * 32)
    assert HOST.compatible_with(rebuilt, any_wheel=True) is not None


def test_a_message_says_the_same() -> None:
    assert Toolchain.from_message(HOST.to_message()) == HOST


def test_the_local_toolchain_is_that_of_this_interpreter_and_needs_no_torch() -> None:
    import torch

    code = (
        "import sys; from fuse_cache.proto.toolchain import local_toolchain; found = local_toolchain(); "
        "print(found.torch, found.torch_fingerprint.hex(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    version, fingerprint, imported = done.stdout.split()
    assert version == torch.__version__
    assert fingerprint == local_toolchain().torch_fingerprint.hex()
    assert len(fingerprint) == 64
    assert imported == "False"
