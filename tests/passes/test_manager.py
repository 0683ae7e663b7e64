"""The manager inside a real compilation: what it fuses is bit-equal to eager, and what it tells is true."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import fresh_cache, run_and_get_code

from fuse_cache.passes.base import Outcome, Pass, Setting
from fuse_cache.passes.manager import PassManager, StagePass
from fuse_cache.passes.order import Stage
from fuse_cache.passes.verify import IllegalGraphError
from fuse_cache.proto.pass_config import PassConfig, PassContext, Range, ResolvedPassConfig
from tests.passes.graphs import aot_graph, same_codes
from tests.passes.spellings import divide, functional, gemma, llama, reciprocal, rows, weights

# Torch's own, when Inductor is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
CPU = "cpu-avx2"
EXACT = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Inductor drops casts inside a loop on 2.11 whatever it is told"
)


def resolved(**fields: Any) -> ResolvedPassConfig:
    return PassConfig(**fields).resolve(PassContext(target=CPU))


def manager(**fields: Any) -> PassManager:
    return PassManager(resolved(**fields), Range(), CPU)


@pytest.fixture
def cold() -> Iterator[None]:
    """An Inductor that has compiled nothing yet: on a hit no pass would run."""
    torch._dynamo.reset()
    with fresh_cache():
        yield


def compiled(
    passes: PassManager, function: Callable[..., Any], *args: Tensor, **kwargs: Any
) -> tuple[Any, str]:
    """Compile and call a function; return its results and the generated source."""
    with torch.no_grad():
        options: Any = passes.inductor_patches()
        one = torch.compile(function, options=options, fullgraph=True, **kwargs)
        result, sources = run_and_get_code(one, *args)
    return (one, result), "\n".join(sources)


def block(x: Tensor, weight: Tensor, wide: Tensor, wide_weight: Tensor, scale: Tensor) -> list[Tensor]:
    """Norms with their quantisations, each rounded in its own way, in bfloat16 and in float32."""
    return [
        divide(llama(x, weight), scale),
        reciprocal(gemma(x, weight), scale),
        divide(functional(wide, wide_weight), scale),
        divide(llama(wide, wide_weight), scale),
    ]


@EXACT
def test_compiled_code_is_bit_equal_to_eager_at_every_number_of_rows(cold: None) -> None:
    passes = manager()
    scale = torch.tensor(0.0371)

    def inputs(count: int) -> tuple[Tensor, ...]:
        narrow, wide = (
            rows(count, 720, torch.bfloat16, seed=count),
            rows(count, 720, torch.float32, seed=-count),
        )
        return narrow, weights(720, torch.bfloat16), wide, weights(720, torch.float32), scale

    first = inputs(63)
    torch._dynamo.mark_dynamic(first[0], 0)
    torch._dynamo.mark_dynamic(first[2], 0)
    (one, _), source = compiled(passes, block, *first)
    assert passes.fusions() == {"norm_quant": 4, "act_quant": 0}
    assert passes.near_misses() == ()
    assert "fuse_cache" not in source  # A host needs none of our operators.
    with torch.no_grad():
        for count in (2, 63, 500):
            given = inputs(count)
            for found, expected in zip(one(*given), block(*given), strict=True):
                assert same_codes(found, expected)
    assert passes.fusions()["norm_quant"] == 4  # One compilation served all of them.


def test_another_id_for_another_set_order_target_or_source() -> None:
    def ids(passes: PassManager) -> dict[str, str]:
        return {
            name: one.uuid() for name, one in passes.inductor_patches().items() if isinstance(one, StagePass)
        }

    on, off = ids(manager()), ids(manager(fuse_norm_quant=False))
    assert set(on) == {stage.value for stage in Stage}
    assert on == ids(manager())
    assert off[Stage.FUSE.value] != on[Stage.FUSE.value]
    names = ("eliminate_noops", "norm_reshape", "norm_quant", "act_quant", "cleanup")
    swapped = ("norm_quant", "eliminate_noops", "norm_reshape", "act_quant", "cleanup")
    assert StagePass(names, Setting(CPU)).uuid() == on[Stage.FUSE.value]
    assert StagePass(swapped, Setting(CPU)).uuid() != on[Stage.FUSE.value]
    assert StagePass(names, Setting("sm_90")).uuid() != on[Stage.FUSE.value]


def test_a_range_does_not_change_the_id_unless_it_changes_the_passes() -> None:
    narrow = PassManager(resolved(), Range(symbol=0, lower=1, upper=8), CPU).inductor_patches()
    wide = PassManager(resolved(), Range(symbol=0, lower=9, upper=4096), CPU).inductor_patches()
    for stage in Stage:
        one, other = narrow[stage.value], wide[stage.value]
        assert isinstance(one, StagePass)
        assert isinstance(other, StagePass)
        assert one.uuid() == other.uuid()


def test_a_pass_survives_pickling_and_a_copy_counts_with_the_original() -> None:
    one = manager().inductor_patches()[Stage.FUSE.value]
    assert isinstance(one, StagePass)
    again = pickle.loads(pickle.dumps(one))
    assert again.uuid() == one.uuid()
    assert copy.deepcopy(one) is one


def test_no_hook_is_set_where_no_pass_is_on() -> None:
    passes = PassManager(PassConfig().resolve(PassContext(target=CPU), "O0"), Range(), CPU)
    plain = aot_graph(lambda x: x.relu(), rows(6, 64, torch.bfloat16))
    assert passes.inductor_patches(plain) == {}
    assert not any(record.on for record in passes.report())


def run_stages(passes: PassManager, gm: fx.GraphModule, named_after: fx.GraphModule | None = None) -> None:
    """Run the hooks on one graph, one after the other, as Inductor does around its own passes."""
    patches = passes.inductor_patches(named_after)
    for stage in Stage:
        one = patches[stage.value]
        assert isinstance(one, StagePass)
        one(gm.graph)


def norm_quant_graph() -> fx.GraphModule:
    arguments = rows(6, 64, torch.bfloat16), weights(64, torch.bfloat16), torch.tensor(0.1)
    return aot_graph(lambda x, weight, scale: divide(llama(x, weight), scale), *arguments)


def test_the_report_has_a_row_for_every_pass_and_says_why() -> None:
    passes = manager()
    assert not passes.ran
    run_stages(passes, norm_quant_graph())
    assert passes.ran
    records = {record.name: record for record in passes.report()}
    assert list(records) == [switch.name for switch in resolved().switches]
    fused = records["norm_quant"]
    assert (fused.on, fused.candidates, fused.matches, fused.is_fusion) == (True, 1, 1, True)
    assert fused.bytes_saved == 2 * 6 * 64 * 2
    assert len(fused.fingerprint) == 32
    assert fused.milliseconds > 0
    assert (records["raise_ir"].matches, records["raise_ir"].is_fusion) == (2, False)
    assert (records["act_quant"].on, records["act_quant"].matches) == (True, 0)
    assert not records["attn_quant"].on
    assert (records["async_tp"].on, records["async_tp"].reason) == (False, "tp is 1")


def test_dumps_show_every_pass_before_and_after_and_the_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    run_stages(PassManager(resolved(), Range(), CPU, dump_dir=folder), norm_quant_graph())
    names = {path.name.split(".", 1)[1] for path in folder.iterdir()}
    assert "00.raise_ir.before.py" in names
    assert "01.raise_ir.after.py" in names
    assert "fuse_cache.rms_norm_quant_fp8_static" in next(folder.glob("*norm_quant.after.py")).read_text()
    pattern = (folder / "patterns.norm_quant.py").read_text()
    assert "def _search" in pattern
    assert "def _replacement" in pattern


def test_compilations_that_share_a_folder_keep_their_dumps_apart(tmp_path: Path) -> None:
    def dumped(gm: fx.GraphModule, compile_range: Range, **fields: Any) -> set[str]:
        passes = PassManager(resolved(**fields), compile_range, CPU, dump_dir=tmp_path)
        run_stages(passes, gm, named_after=gm)
        found = {path.name for path in tmp_path.iterdir() if "patterns" not in path.name}
        for path in tmp_path.iterdir():
            path.unlink()
        return found

    def doubled(size: int) -> fx.GraphModule:
        return aot_graph(lambda x: x + x, torch.zeros(size))

    graphs = [
        dumped(norm_quant_graph(), Range()),
        dumped(norm_quant_graph(), Range(symbol=0, lower=1, upper=8)),
        dumped(norm_quant_graph(), Range(), fuse_norm_quant=False),
        dumped(doubled(4), Range()),
        dumped(doubled(5), Range()),
    ]
    assert len(set.union(*graphs)) == sum(map(len, graphs))
    assert {len({name.split(".")[0] for name in names}) for names in graphs} == {1}
    assert dumped(norm_quant_graph(), Range()) == graphs[0]  # Once more it is the same compilation.


def test_a_dump_folder_that_cannot_be_written_costs_one_warning_and_no_compilation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "dumps"
    for _ in range(2):
        passes = PassManager(resolved(), Range(), CPU, dump_dir=folder)
        run_stages(passes, norm_quant_graph())
        assert passes.fusions()["norm_quant"] == 1
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder) in record.getMessage()


def test_a_pass_that_breaks_the_graph_fails_the_compilation_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_the_outputs(graph: fx.Graph, setting: Setting) -> Outcome:
        graph.output_node().args = ((),)
        return Outcome()

    monkeypatch.setattr("fuse_cache.passes.norm_quant.PASS", Pass("norm_quant", drop_the_outputs))
    with pytest.raises(IllegalGraphError, match="pass norm_quant: 0 outputs instead of 1"):
        run_stages(manager(), norm_quant_graph())


def test_a_training_graph_is_left_alone() -> None:
    gm = norm_quant_graph()
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("tangents_1").meta["val"] = torch.empty(())
    passes = manager()
    run_stages(passes, gm)
    assert not passes.ran


@pytest.mark.slow
def test_the_old_rewrite_never_comes_back_from_inductors_own_cache(cold: None) -> None:
    # Case 2 with real code: ON, OFF and ON again against one Inductor folder.
    arguments = rows(9, 96, torch.bfloat16), weights(96, torch.bfloat16), torch.tensor(0.0371)

    def one(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return divide(llama(x, weight), scale)

    sources, ran = [], []
    for fields in ({}, {"fuse_norm_quant": False}, {}):
        torch._dynamo.reset()
        passes = manager(**fields)
        _, source = compiled(passes, one, *arguments)
        sources.append(source)
        ran.append(passes.ran)
    assert "aten.mean.dim" in sources[0]  # Fused: the exact reduction.
    assert "aten.mean.dim" not in sources[1]
    assert ran == [
        True,
        True,
        False,
    ]  # The third was a hit: no pass ran, and the counts are the artifact's to keep.


def test_level_o0_hands_inductor_no_pass_at_all() -> None:
    off = PassConfig().resolve(PassContext(target=CPU), "O0")
    passes = PassManager(off, Range(), CPU)
    assert passes.inductor_patches(fx.symbolic_trace(torch.nn.ReLU())) == {}
    assert not any(record.on for record in passes.report())
    assert passes.fusions() == {}
    assert not passes.ran
