"""What users may write, and what they are told when it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuse_cache.client.errors import OptionError
from fuse_cache.client.options import OPTION_NAMES, CompileOptions
from fuse_cache.client.settings import cache_folder, load_options
from fuse_cache.proto.pass_config import PassConfig
from fuse_cache.proto.signing import SigningKey

# As the design names them: the user's surface is fixed.
DESIGN = [
    "endpoint",
    "mode",
    "level",
    "pass_config",
    "compile_ranges",
    "range_dim",
    "target",
    "namespace",
    "cache_dir",
    "trusted_keys",
    "token",
    "tls",
    "lookup_timeout_s",
    "max_queue_s",
    "compile_timeout_s",
    "tp",
    "max_num_batched_tokens",
    "dense",
    "splitting_ops",
    "regional",
    "skip_tracing",
    "attention_backend",
    "accept_revisions",
    "allow_unsigned",
    "allow_cpu_wheel_builds",
    "strict",
    "dump_dir",
    "inductor",
]

WRONG: list[tuple[str, Any, str]] = [
    ("endpoint", "localhost", "HOST:PORT"),
    ("endpoint", [], "HOST:PORT"),
    ("endpoint", "host:99999", "HOST:PORT"),
    ("mode", "fast", "auto, remote, local, off"),
    ("level", "O4", "O0, O1, O2, O3"),
    ("level", 2, "O0, O1, O2, O3"),
    ("pass_config", {"fuse_norm": True}, "fuse_norm_quant"),
    ("pass_config", {"fuse_norm_quant": 1}, "fuse_norm_quant"),
    ("compile_ranges", [[5, 4]], "[lowest, highest]"),
    ("compile_ranges", [[1, 8], [8, 16]], "[lowest, highest]"),
    ("compile_ranges", [[0, 8]], "from 1 on"),
    ("compile_ranges", [], "[lowest, highest]"),
    ("range_dim", "input_ids", "input:dim"),
    ("range_dim", "x:-1", "input:dim"),
    ("trusted_keys", ["ab"], "Ed25519"),
    ("tls", {"certificate": "x"}, "ca, cert and key"),
    ("tls", {"cert": "x"}, "together"),
    ("lookup_timeout_s", 0, "positive"),
    ("lookup_timeout_s", float("nan"), "positive"),
    ("compile_timeout_s", "1", "positive"),
    ("tp", 0, "tensor-parallel"),
    ("max_num_batched_tokens", True, "integer"),
    ("dense", 1, "True or False"),
    ("splitting_ops", "aten::add", "list"),
    ("attention_backend", "fa3", "flash"),
    ("inductor", {"max_autotune": True}, "epilogue_fusion"),
    ("inductor", {"epilogue_fusion": 1}, "bool"),
]


def test_the_options_are_those_of_the_design() -> None:
    assert set(OPTION_NAMES) == set(DESIGN)


def test_an_unknown_option_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown option 'compile_range': use one of .*compile_ranges"):
        CompileOptions.from_mapping({"compile_range": [[1, 2]]})


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_is_an_error_that_names_the_option_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(OptionError) as caught:
        CompileOptions.from_mapping({name: value})
    assert name in str(caught.value)
    assert allowed in str(caught.value)


def test_options_take_what_users_write(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "signing.key")
    options = CompileOptions.from_mapping(
        {
            "endpoint": ["10.0.0.1:7788", "unix:/run/fc.sock"],
            "pass_config": {"fuse_norm_quant": True},
            "compile_ranges": [[1, 256], [257, 4096]],
            "range_dim": "input_ids:1",
            "trusted_keys": [str(tmp_path / "signing.key.pub"), key.public_key.hex(), key.public_key],
            "inductor": {"epilogue_fusion": False},
        }
    )
    assert options.endpoint == ("10.0.0.1:7788", "unix:/run/fc.sock")
    assert options.pass_config == PassConfig(fuse_norm_quant=True)
    assert options.compile_ranges == ((1, 256), (257, 4096))
    assert options.range_dim == ("input_ids", 1)
    assert set(options.trusted_keys) == {key.public_key}
    assert options.inductor == (("epilogue_fusion", False),)


def test_the_call_goes_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "fuse-cache.toml"
    file.write_text('listen = ["127.0.0.1:1"]\n[client]\nmode = "local"\nlevel = "O1"\nnamespace = "file"\n')
    environment = {
        "FUSE_CACHE_CONFIG": str(file),
        "FUSE_CACHE_LEVEL": "O3",
        "FUSE_CACHE_NAMESPACE": "environment",
        "FUSE_CACHE_STRICT": "yes",
        "FUSE_CACHE_MAX_QUEUE_S": "7",
        "FUSE_CACHE_ENDPOINT": "127.0.0.1:1,127.0.0.1:2",
        "FUSE_CACHE_COMPILE_RANGES": "[[1, 4]]",
    }
    options = load_options({"namespace": "call"}, environment)
    assert (options.namespace, options.level, options.mode, options.target) == ("call", "O3", "local", "auto")
    assert (options.strict, options.max_queue_s) == (True, 7.0)
    assert options.endpoint == ("127.0.0.1:1", "127.0.0.1:2")
    assert options.compile_ranges == ((1, 4),)


def test_an_unknown_name_in_the_file_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fuse-cache.toml"
    file.write_text("[client]\nmodes = 'auto'\n")
    with pytest.raises(OptionError, match=r"fuse-cache\.toml: unknown option client\.modes"):
        load_options({}, {"FUSE_CACHE_CONFIG": str(file)})


def test_a_token_is_not_shown() -> None:
    assert "s3cret" not in repr(CompileOptions.from_mapping({"token": "s3cret"}))


def test_a_live_process_group_says_its_own_size() -> None:
    class Group:
        group_name = "0"

        def size(self) -> int:
            return 4

    options = CompileOptions.from_mapping({"tp": Group()})
    assert (options.tp, options.tp_group) == (4, "0")


def test_only_remote_mode_has_the_patience_to_wait() -> None:
    auto, remote = (CompileOptions.from_mapping({"mode": mode}) for mode in ("auto", "remote"))
    assert (auto.life_bound_s, auto.answer_bound_s, auto.silence_bound_s, auto.queue_bound_s) == (
        0.25,
        2,
        5,
        2,
    )
    assert remote.life_bound_s > auto.life_bound_s
    assert remote.queue_bound_s == remote.compile_timeout_s == 900


def test_a_uid_without_a_home_gets_a_folder_in_the_systems_temporary_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/")
    assert cache_folder(CompileOptions(), {}).parts[-3:-1] != (".cache", "fuse-cache")
    assert cache_folder(CompileOptions(), {"XDG_CACHE_HOME": "/x"}) == Path("/x/fuse-cache/client")
