"""One running daemon: its parts, the order in which they start, and the order in which they stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fuse_cache.proto import admin_pb2, admin_pb2_grpc, compile_pb2, compile_pb2_grpc
from fuse_cache.proto.artifact_pb2 import SignedManifest
from fuse_cache.proto.limits import CONTENT_BYTES
from fuse_cache.proto.signing import SignatureError, verify
from fuse_cache.server.admin import AdminService
from fuse_cache.server.admission import Gate
from fuse_cache.server.builders import Builder, Builders
from fuse_cache.server.cache.compose import DEFAULT_DISK_BYTES, DEFAULT_MEMORY_BYTES, open_store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.checker import GraphChecker
from fuse_cache.server.compiler import Compiler
from fuse_cache.server.config import ServerConfig
from fuse_cache.server.errors import UnavailableError
from fuse_cache.server.explain import Explainer
from fuse_cache.server.fetch import ContentStreams, Grants
from fuse_cache.server.follow import Follower
from fuse_cache.server.freshness import Freshness
from fuse_cache.server.http import HttpPages
from fuse_cache.server.jobs import Jobs
from fuse_cache.server.kept_graphs import KeptGraphs
from fuse_cache.server.keys import load_keys
from fuse_cache.server.listen import bind
from fuse_cache.server.lookup import Lookups
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.misses import MissLog
from fuse_cache.server.pass_runs import PassRuns
from fuse_cache.server.recalls import Recalls
from fuse_cache.server.reports import Reports
from fuse_cache.server.revisions import Revisions
from fuse_cache.server.seeds import Seeds
from fuse_cache.server.service import CompileService, raw_handler
from fuse_cache.server.status import Status
from fuse_cache.server.toolchains import LinkedToolchain
from fuse_cache.server.undecodable import NamedRefusals
from fuse_cache.server.worker.link import Loading
from fuse_cache.server.worker.pool import WorkerPool
from fuse_cache.server.workfolder import WorkFolder

log = logging.getLogger(__name__)

STORE_WATCH_S = 5.0
STREAM_GRACE_S = 2.0  # For answers on their way out, after the last compilation has ended.
SERVICES = (
    compile_pb2.DESCRIPTOR.services_by_name["Compile"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)
OPTIONS = (
    ("grpc.so_reuseport", 0),  # Two daemons on one port would each get some of the calls, in silence.
    ("grpc.max_receive_message_length", 4 << 20),  # A chunk is 512 KiB, a Lookup of 1,024 items 200 KiB.
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.keepalive_time_ms", 120_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 30_000),
)


class Daemon:
    """Composes the parts of one daemon. `start`, `stopped` and `close` once each, in this order."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        work: WorkFolder,
        toolchains: Sequence[LinkedToolchain],
        seed_entry: str,
    ) -> None:
        self._config = config
        self._work = work
        self._stop = asyncio.Event()
        self._grace_s = config.drain_grace_s
        self._tasks: list[asyncio.Task[None]] = []

        signing_key, trusted = load_keys(config)
        self._recalls = Recalls(config.store)
        trusted = dataclasses.replace(trusted, revoked=self._recalls.read())
        self.metrics = metrics = Metrics()
        builders = Builders([self._builder(item, seed_entry) for item in toolchains])
        self._builders = builders
        self.status = status = Status(targets=config.target, builders=builders, trusted=trusted)
        self.store = store = open_store(
            config.store,
            memory_bytes=config.memory_bytes or DEFAULT_MEMORY_BYTES,
            disk_bytes=config.disk_bytes or DEFAULT_DISK_BYTES,
            check_manifest=self._check_manifest,
        )
        self.jobs = jobs = Jobs(max_queue=config.max_queue, now_s=time.monotonic)
        self._checker = GraphChecker(builders.first.link)
        kept = KeptGraphs(work.path / "graphs")
        self._compiler = Compiler(
            jobs=jobs,
            checker=self._checker,
            store=store,
            work=work,
            kept=kept,
            signing_key=signing_key,
            metrics=metrics,
            workers=config.workers,
            op_modules=config.op_modules,
        )
        grants = Grants(store)
        gate = Gate(config.target, builders)
        misses = MissLog()
        reports = Reports(store, status, metrics, Revisions(store, status, signing_key))
        self._compile_service = CompileService(
            lookups=Lookups(
                store=store,
                jobs=jobs,
                builders=builders,
                grants=grants,
                misses=misses,
                metrics=metrics,
                revocations=lambda: status.revocations_version,
            ),
            follower=Follower(
                jobs=jobs, compiler=self._compiler, store=store, work=work, grants=grants, metrics=metrics
            ),
            streams=ContentStreams(store, grants, metrics),
            reports=reports,
            explainer=Explainer(
                store,
                misses,
                PassRuns(self._checker, builders.first.pool, work, config.op_modules),
                kept,
            ),
            gate=gate,
            builders=builders,
            status=status,
            metrics=metrics,
        )
        self._admin_service = AdminService(
            store=store,
            status=status,
            reports=reports,
            metrics=metrics,
            recalls=self._recalls,
            drain=self._drain_by_rpc,
        )
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()
        self._pages = HttpPages(status, metrics)

    async def start(self) -> None:
        """Listen. Lookups are answered from here on; workers may still be loading.

        Raises:
            OSError: an address cannot be listened on.
        """
        config = self._config
        # Asked first, so that its Lookup and Fetch are the ones that write their replies by hand.
        self._server.add_generic_rpc_handlers((raw_handler(self._compile_service),))
        named: Any = NamedRefusals(self._server)
        compile_pb2_grpc.add_CompileServicer_to_server(self._compile_service, named)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin_service, named)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), self._server)
        bound = [bind(self._server, address) for address in config.listen]
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        http_port = await self._pages.start(config.http) if config.http else 0
        log.info(
            "serving",
            extra={
                "listen": bound,
                "http_port": http_port,
                "epoch": self._builders.first.epoch.name,
                "toolchains": {builder.name: str(builder.toolchain) for builder in self._builders},
                "targets": config.target,
                "store": str(config.store),
            },
        )
        for builder in self._builders:
            builder.link.on_change = functools.partial(self._loading_changed, builder)
            # The others when a host first needs them: each takes 400 MB, and is ready in 4 s.
            builder.link.attach(load=builder is self._builders.first)
        self.store.start()
        self._tasks += [
            *(asyncio.create_task(builder.freshness.watch()) for builder in self._builders),
            asyncio.create_task(self._watch_store()),
            asyncio.create_task(self._prepare()),
        ]

    async def stopped(self) -> None:
        """Wait until the daemon is told to stop, then end what runs."""
        await self._stop.wait()
        log.info("draining", extra={"running": self._compiler.busy, "grace_s": self._grace_s})
        self.status.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._compiler.drain(self._grace_s)
        await self._server.stop(STREAM_GRACE_S)

    async def close(self) -> None:
        """Let go of everything; also after a start that failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for builder in self._builders:
            await builder.seeds.close()
        await self._server.stop(0)
        await self._pages.stop()
        self._checker.close()
        await asyncio.gather(*(builder.link.close() for builder in self._builders))
        await self.store.close()
        self._work.close()
        log.info("stopped")

    def stop_soon(self) -> None:
        """Begin to stop. Asked a second time, do not wait for what runs."""
        if self._stop.is_set():
            os._exit(1)  # The supervisor sees our end of its socket close and ends everything below it.
        self._stop.set()

    def _drain_by_rpc(self, grace_s: float) -> int:
        if not self._stop.is_set():
            self._grace_s = grace_s or self._grace_s
            self._stop.set()
        return self._compiler.busy

    async def _prepare(self) -> None:
        """Have a validator, and the seed of the first target, before anybody asks. Then tidy up."""
        try:
            await self._checker.start()
        except UnavailableError as error:
            log.error("no validator", extra={"why": error.message})  # Tried again with the first graph.
        first = self._builders.first
        if self._config.target:
            await first.seeds.ready(first.epoch, self._config.target[0])
        await asyncio.to_thread(self._work.sweep)
        epochs = [builder.epoch for builder in self._builders]
        await asyncio.to_thread(first.seeds.sweep, epochs, self._config.target)

    async def _watch_store(self) -> None:
        while True:
            self.status.store_reason = await asyncio.to_thread(self.store.catalogue.health)
            # Another daemon of this store may have been told to recall a builder.
            new = self.status.revoke(await asyncio.to_thread(self._recalls.read))
            if new:
                await self._remove_builders(new)
            await asyncio.sleep(STORE_WATCH_S)

    async def _remove_builders(self, builders: frozenset[str]) -> None:
        log.warning("builders recalled", extra={"builders": sorted(builders)})
        with contextlib.suppress(TierError):  # What stays is refused when it is read.
            keys = [info.key async for info in self.store.iterate() if info.facts.builder in builders]
            for key in keys:
                await self.store.remove(key)

    def _builder(self, item: LinkedToolchain, seed_entry: str) -> Builder:
        config = self._config
        pool = WorkerPool(
            item.link,
            seconds=config.job_timeout_s,
            max_bytes=config.job_memory_bytes,
            max_content_bytes=CONTENT_BYTES,
        )
        return Builder(
            name=item.name,
            freshness=Freshness(item.sources, on_change=item.link.reload),
            link=item.link,
            pool=pool,
            seeds=Seeds(config.work_dir / "seeds", self._work, pool, seed_entry),
        )

    def _loading_changed(self, builder: Builder, loading: Loading) -> None:
        why = builder.link.message
        log.info("workers", extra={"toolchain": builder.name, "state": loading.value, "why": why})

    def _check_manifest(self, key: bytes, signed_manifest: bytes) -> str | None:
        """Say why a manifest from disk must not be served, or None."""
        try:
            manifest = verify(SignedManifest.FromString(signed_manifest), self.status.trusted)
        except (SignatureError, ValueError) as error:
            return str(error)
        return None if manifest.key == key else "it stands under another key than its own"

    async def _set_health(self, state: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", *SERVICES):
            await self._health.set(name, state)
