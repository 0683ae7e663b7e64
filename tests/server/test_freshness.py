"""Case 57: an upgrade in place under a daemon makes new keys, never old artifacts under a new name."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from fuse_cache.proto.admin_pb2 import StatsRequest
from fuse_cache.proto.artifact_pb2 import Manifest
from fuse_cache.proto.pass_config import PassConfig, PassContext, Range
from fuse_cache.server.epoch import _PLUMBING, _WIRE_ONLY, EpochError, package_root, take_epoch, take_stamps
from fuse_cache.server.interpreter import own_interpreter as own
from tests.server.harness import CALL_S, Call, FakeDaemon, compile_piece, copy_sources, lookup, piece, until


def epoch_of(daemon: FakeDaemon) -> str:
    return str(daemon.admin().Stats(StatsRequest(), timeout=CALL_S).epoch)


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# edited\n")


def test_an_edited_worker_source_makes_a_new_epoch_and_a_miss(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        stub, wanted = daemon.stub(), piece()
        old = Manifest.FromString(compile_piece(stub, wanted).done.manifest.manifest)
        edit(daemon.sources / "server" / "worker" / "rebuild.py")
        new = Manifest.FromString(compile_piece(stub, wanted).done.manifest.manifest)
        assert new.epoch != old.epoch
        assert new.key != old.key
        names = {field.name for field in new.key_fields if field not in old.key_fields}
        assert names == {"worker_sources"}
        # Both live side by side; lookups are answered from the new epoch.
        assert lookup(stub, wanted).results[0].manifest.manifest == new.SerializeToString()
        assert daemon.admin().Stats(StatsRequest(), timeout=CALL_S).entries == 2
        assert daemon.log().count('"state": "ready"') == 2  # The fork server has loaded the new sources.


def test_an_edit_is_noticed_without_anybody_asking(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        before = epoch_of(daemon)
        edit(daemon.sources / "server" / "worker" / "rebuild.py")
        until(lambda: epoch_of(daemon) != before)


def test_a_build_during_which_sources_change_is_not_published(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d") as daemon:
        gate = tmp_path / "gate"
        stub, wanted = daemon.stub(), piece(f"wait:{gate}")
        call = Call(stub, wanted.start)
        call.next_of("need_graph")
        call.send_graph(wanted.graph)
        call.next_of("compiling")
        until(lambda: call.next_of("compiling").compiling.stage == "inductor")
        edit(daemon.sources / "server" / "worker" / "rebuild.py")
        gate.touch()
        failed = call.next_of("failed").failed
        assert "changed" in failed.message
        assert not failed.deterministic
        call.close()
        assert compile_piece(stub, wanted).WhichOneof("event") == "done"


def test_a_change_of_the_daemons_own_code_asks_for_a_restart(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        edit(daemon.sources / "server" / "lookup.py")
        admin = daemon.admin()
        until(lambda: admin.Stats(StatsRequest(), timeout=CALL_S).status == "DEGRADED")


def test_an_edited_pass_changes_its_own_fingerprint_only(tmp_path: Path) -> None:
    copy_sources(tmp_path / "s")
    root = tmp_path / "s"
    before = take_epoch(take_stamps(own(root)), own(root), op_modules=())
    edit(root / "passes" / "norm_quant.py")
    after = take_epoch(take_stamps(own(root)), own(root), op_modules=())
    changed = {name for name in before.passes if before.passes[name] != after.passes[name]}
    assert changed == {"norm_quant"}
    assert after.name != before.name
    assert after.worker_sources == before.worker_sources


def test_an_edited_rounding_rule_makes_another_epoch_and_another_key_with_every_pass_off(
    tmp_path: Path,
) -> None:
    root = tmp_path / "s"
    copy_sources(root)
    off = PassConfig().resolve(PassContext(target="cpu-avx2"), "O0").active_passes(Range())
    assert off == ()

    def taken() -> tuple[str, bytes]:
        epoch = take_epoch(take_stamps(own(root)), own(root), op_modules=())
        fields = epoch.key_fields(request_digest=b"r", namespace="n", target="cpu-avx2", passes=off)
        return epoch.name, fields.digest()

    before = taken()
    assert taken() == before
    edit(root / "passes" / "rounding.py")
    name, key = taken()
    assert name != before[0]
    assert key != before[1], "artifacts of the old rule would be found under the old key"


def test_a_kernel_library_that_is_absent_makes_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Case 19: whether kernels of ours, operators of the model and Triton are there chooses the code.
    root, modules = tmp_path / "s", ("its_kernels",)
    copy_sources(root)
    operators = tmp_path / "its_kernels.py"
    operators.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def key(*, triton: bool = True) -> bytes:
        stamps = take_stamps(own(root), op_modules=modules)
        if not triton:
            toolchain = dataclasses.replace(stamps.toolchain, triton="", triton_fingerprint=b"")
            stamps = dataclasses.replace(stamps, toolchain=toolchain)
        epoch = take_epoch(stamps, own(root), op_modules=modules)
        fields = epoch.key_fields(
            request_digest=b"r", namespace="n", target="cpu-avx2", passes=("norm_quant",)
        )
        return fields.digest()

    whole = key()
    assert key() == whole
    keys = [whole, key(triton=False)]
    operators.unlink()
    keys.append(key())
    operators.write_text("x = 1\n")
    shutil.rmtree(root / "kernels" / "fused_quant")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_fingerprints_are_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, memo = tmp_path / "s", tmp_path / "memo.json"
    copy_sources(root)
    first = take_epoch(take_stamps(own(root)), own(root), op_modules=(), memo=memo)
    monkeypatch.setattr("fuse_cache.server.epoch.FINGERPRINT_COMMAND", ("/bin/false",))
    assert take_epoch(take_stamps(own(root)), own(root), op_modules=(), memo=memo) == first
    os.utime(root / "passes" / "order.py")
    with pytest.raises(EpochError):
        take_epoch(take_stamps(own(root)), own(root), op_modules=(), memo=memo)


def test_an_edited_graph_reader_makes_another_key_and_loads_workers_anew(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        stub, wanted = daemon.stub(), piece()
        old = Manifest.FromString(compile_piece(stub, wanted).done.manifest.manifest)
        edit(daemon.sources / "proto" / "graph_reader.py")
        new = Manifest.FromString(compile_piece(stub, wanted).done.manifest.manifest)
        assert new.key != old.key
        assert daemon.log().count('"state": "ready"') == 2


def test_what_a_worker_reaches_is_in_its_fingerprint() -> None:
    """By the imports themselves: a file that workers use must not be taken for one of the wire's."""
    from fuse_cache.passes.fingerprint import _Sources

    sources = _Sources(package_root())
    reached = sources.reach("fuse_cache.server.worker.compile") | sources.reach(
        "fuse_cache.server.worker.seed"
    )
    for folder, left_out in (("proto", _WIRE_ONLY), ("server.worker", _PLUMBING)):
        named = {f"fuse_cache.{folder}.{name.removesuffix('.py')}" for name in left_out}
        told = {"fuse_cache.server.worker.checked", "fuse_cache.server.worker.protocol"}
        assert not reached & named - told


def test_an_edited_operator_module_makes_another_epoch_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "its_ops"
    (package / "deep").mkdir(parents=True)
    for path in (package / "__init__.py", package / "deep" / "__init__.py"):
        path.write_text("raise ImportError\n")
    (package / "deep" / "norms.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    root, modules = package_root(), ("its_ops.deep.norms",)

    def taken() -> tuple[bytes, str, bytes]:
        stamps = take_stamps(own(root), op_modules=modules)
        epoch = take_epoch(stamps, own(root), op_modules=modules)
        key = epoch.key_fields(request_digest=bytes(32), namespace="", target="cpu-avx2", passes=())
        return stamps.build, epoch.name, key.digest()

    before = taken()
    assert taken() == before
    edit(package / "deep" / "norms.py")
    assert all(a != b for a, b in zip(before, taken(), strict=True))


def test_operator_modules_are_part_of_the_epoch() -> None:
    root = package_root()
    stamps = take_stamps(own(root))
    names = {take_epoch(stamps, own(root), op_modules=modules).name for modules in ((), ("my.ops",))}
    assert len(names) == 2
