"""Options: where they come from, who wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import fields

from fuse_cache.server.config import ConfigError, ServerConfig, is_local, load_config


def test_command_line_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('workers = 2\nmax_queue = 7\nlog_level = "debug"\ntarget = ["cpu-avx2"]\n')
    environment = {"FUSE_CACHE_WORKERS": "3", "FUSE_CACHE_MAX_QUEUE": "8"}
    config = load_config({"workers": 4, "store": None}, file, environment)
    assert (config.workers, config.max_queue, config.log_level) == (4, 8, "debug")
    assert config.target == ("cpu-avx2",)
    assert config.http == "127.0.0.1:7789"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("workers = 5\n")
    assert load_config({}, None, {"FUSE_CACHE_CONFIG": str(file)}).workers == 5


@pytest.mark.parametrize(
    ("options", "environment", "text", "message"),
    [
        ({"worker": 1}, {}, "", r"the command line: worker is not an option; did you mean workers\?"),
        ({}, {"FUSE_CACHE_WORKER": "1"}, "", r"FUSE_CACHE_WORKER is not an option; did you mean workers\?"),
        ({}, {}, "stor = 'x'", r"c.toml: stor is not an option; did you mean store\?"),
        ({}, {"FUSE_CACHE_WORKERS": "many"}, "", "the environment: workers: Expected `int`.*many"),
        ({"workers": 0}, {}, "", "the command line: workers: Expected `int` >= 1"),
        ({"target": "sm_75"}, {}, "", "target: sm_75 is not built by this version; it builds cpu-"),
        ({}, {"FUSE_CACHE_TOOLCHAIN": "/x"}, "", r"a table of the TOML file: \[toolchain.NAME\], python ="),
        ({}, {}, "[toolchain.a]\npyton = '/x'", "c.toml: toolchain: .*unknown field `pyton`"),
        ({}, {}, "[toolchain.'a b']\npython = '/x'", "'a b' cannot name one: use letters"),
        ({}, {}, "[toolchain.own]\npython = '/x'", "'own' cannot name one: .* not 'own'"),
        ({"listen": "0.0.0.0:1"}, {}, "", "listen: 0.0.0.0:1 would serve plaintext to other machines"),
        ({"http": "example.com:80"}, {}, "", "http: example.com:80 would serve plaintext"),
        ({"listen": "nonsense"}, {}, "", "nonsense is not HOST:PORT or unix:PATH"),
        ({"listen": ""}, {}, "", "give at least one"),
        ({"redis": "redis://x"}, {}, "", "no Redis tier"),
        ({}, {}, "workers = ", r"c.toml is no TOML: .*such as workers = 4"),
        ({}, {}, 'workers = "3"', "c.toml: workers: Expected `int`, got `str`"),
        ({}, {"FUSE_CACHE_INSECURE": "maybe"}, "", "the environment: insecure: Expected `bool`.*maybe"),
        ({}, {"FUSE_CACHE_DRAIN_GRACE_S": "nan"}, "", "drain_grace_s: Expected `float` >= 0"),
    ],
)
def test_what_is_wrong_is_refused_with_its_origin(
    tmp_path: Path, options: dict[str, object], environment: dict[str, str], text: str, message: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(options, file, environment)


def test_every_option_can_be_given_as_text_and_keeps_its_type() -> None:
    defaults = load_config({}, None, {})
    texts = {}
    for field in fields(ServerConfig):
        value = getattr(defaults, field.name)
        if value not in (None, "", {}):  # A table is of the file alone.
            texts[f"FUSE_CACHE_{field.name.upper()}"] = (
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            )
    assert load_config({}, None, texts) == defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": True}, "workers: Expected `int`, got `bool`"),
        ({"workers": 1.5}, r"workers: Expected `int`, got `float` \(given: 1.5\)"),
        ({"workers": 5000}, "workers: Expected `int` <= 1024"),
        ({"job_timeout_s": 0}, "job_timeout_s: Expected `float` > 0"),
        ({"log_level": "loud"}, "log_level: .*it may be debug, info, warning, error"),
        ({"op_modules": 3}, "op_modules: Expected `array`, got `int`"),
        ({"store": ""}, "store: Expected a path"),
        ({"trusted_keys": [7]}, "trusted_keys: Expected a path.*7"),
        ({"workers": 0, "max_queue": 0}, "workers: .*; the command line: max_queue: "),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(options, None, {})


def test_options_of_the_client_are_none_of_ours() -> None:
    assert (
        load_config({}, None, {"FUSE_CACHE_ENDPOINT": "unix:/x", "FUSE_CACHE_TRUST_DIR": "/t"}).workers >= 1
    )


def test_plaintext_beyond_this_machine_needs_to_be_said_aloud() -> None:
    config = load_config({"listen": "0.0.0.0:1,unix:/tmp/x", "insecure": True}, None, {})
    assert config.listen == ("0.0.0.0:1", "unix:/tmp/x")
    addresses = ("127.0.0.2:1", "[::1]:1", "localhost:1", "unix:/x", "10.0.0.1:1", "h:1")
    assert [is_local(address) for address in addresses] == [True, True, True, True, False, False]


def test_a_gpu_may_be_named_by_its_architecture_or_by_itself() -> None:
    config = load_config({"target": "h200,sm_80,cpu-avx2,h100"}, None, {})
    assert config.target == ("sm_90", "sm_80", "cpu-avx2")


def test_toolchains_are_tables_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[toolchain.old]\npython = "/opt/old/bin/python"\n[client]\nmode = "auto"\n')
    found = load_config({}, file, {}).toolchain
    assert {name: str(item.python) for name, item in found.items()} == {"old": "/opt/old/bin/python"}
