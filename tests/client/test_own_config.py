"""Settings of the host's own compiler that a daemon's builds do not follow."""

from __future__ import annotations

import pytest
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from fuse_cache.client.own_config import own_settings, warn_of_own_settings
from fuse_cache.client.warn import warn_once


def test_what_the_host_set_is_named_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with inductor_config.patch(epilogue_fusion=False, max_autotune=True):
        pass  # Leaves them set, to what they were.
    before = own_settings()
    assert not {
        name for name in before if "epilogue_fusion" in name or "max_autotune" in name.rpartition(".")[2]
    }
    with (
        inductor_config.patch({"epilogue_fusion": False, "max_autotune": True, "compile_threads": 3}),
        functorch_config.patch(treat_parameters_as_free_to_save=False),
    ):
        found = {name: value for name, value in own_settings().items() if name not in before}
        assert found == {
            "torch._inductor.config.epilogue_fusion": False,
            "torch._inductor.config.max_autotune": True,
            "torch._functorch.config.treat_parameters_as_free_to_save": False,
        }
        warn_of_own_settings.cache_clear()
        warn_once.cache_clear()
        for _ in range(2):
            warn_of_own_settings()
    warnings = [record.getMessage() for record in caplog.records if record.getMessage().split()[0] in found]
    assert len(warnings) == 3
    assert "options={'inductor': {'epilogue_fusion': False}}" in warnings[0]
    assert "use mode='local' if it matters" in warnings[1]
    assert "built without it" in warnings[2]
