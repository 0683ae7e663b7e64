"""Orders while there is no supervisor to give them to."""

from __future__ import annotations

from fuse_cache.server.worker.link import Loading, SupervisorLink


async def test_killing_and_reloading_while_the_supervisor_is_being_replaced_are_no_errors() -> None:
    link = SupervisorLink("fake_builds:build", {})
    link.kill("validator-1")
    link.reload()
    assert link.loading is Loading.LOADING
    await link.close()
