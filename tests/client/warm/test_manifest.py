"""Warm manifests: what they may say, and how what they may not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse_cache.client.errors import OptionError
from fuse_cache.client.warm.manifest import InputPlan, ModelPlan, read_manifest

INPUTS = 'inputs = [{name = "x", shape = ["n", 8], dtype = "float32"}]\n'
GOOD = '[[model]]\nname = "m"\nfactory = "a.b:c"\n' + INPUTS


def written(folder: Path, text: str) -> Path:
    path = folder / "warm.toml"
    path.write_text(text)
    return path


def test_a_manifest_is_read_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = (
        GOOD + 'ranges = [[1, 8]]\nrange_dim = "x:0"\ntargets = ["h200", "cpu-avx2"]\nlevel = "O1"\n'
        '[[model]]\nname = "two"\nhf_config = "config.json"\ndtype = "bfloat16"\n'
        'inputs = [{name = "ids", shape = [], dtype = "int64"}, {name = "use_cache", value = false}]\n'
    )
    first, second = read_manifest(written(tmp_path, text))
    assert first == ModelPlan(
        name="m", factory="a.b:c", hf_config=None, dtype=None,
        inputs=(InputPlan(name="x", shape=("n", 8), dtype="float32"),), targets=("h200", "cpu-avx2"),
        options={"compile_ranges": [[1, 8]], "range_dim": "x:0", "level": "O1"},
    )  # fmt: skip
    assert second.hf_config == tmp_path / "config.json"
    assert second.inputs[1] == InputPlan(name="use_cache", value=False)
    assert second.targets == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "is no TOML"),
        ("", r"has no \[\[model\]\]"),
        ("models = 3\n" + GOOD, r"models is not allowed here: a manifest has \[\[model\]\] tables"),
        (GOOD + GOOD, "two models are called m"),
        (GOOD.replace('name = "m"\n', ""), "model number 1: it has no name"),
        (GOOD + 'rangs = [[1, 2]]', "model m: unknown 'rangs': use name, factory, .*, ranges, "),
        (GOOD + 'mode = "auto"', "model m: unknown 'mode'"),
        (GOOD + 'hf_config = "x.json"', "model m: give one of factory = .* and hf_config"),
        (GOOD.replace('factory = "a.b:c"\n', ""), "model m: give one of factory"),
        (GOOD.replace("a.b:c", "a.b"), "factory = 'a.b' is wrong: use \"module:function\""),
        (GOOD.replace("factory", "hf_config"), "no file .*a.b:c; a path is relative to the manifest"),
        (GOOD.replace(INPUTS, ""), "model m: it has no inputs"),
        (GOOD.replace(INPUTS, "inputs = []"), r"give at least one \{name = .input_ids., shape = "),
        (GOOD.replace('"n"', "-1"), "inputs: x: shape = .-1, 8. is wrong: use sizes, and names"),
        (GOOD.replace("float32", "float33"), "inputs: x: dtype = 'float33' is wrong: use one of float32, "),
        (GOOD.replace(', dtype = "float32"', ""), "inputs: x: give dtype and shape, and nothing else"),
        (GOOD + 'dtype = "int64"', "dtype = 'int64' is wrong: use one of float32, float16, bfloat16, "),
        (GOOD + "targets = 3", "targets must be a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_the_model_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        read_manifest(written(tmp_path, text))


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"none.toml: No such file .*\[\[model\]\] tables"):
        read_manifest(tmp_path / "none.toml")
