"""Takes queued jobs to workers, seals what comes back, publishes it, and tells everyone who waits."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from fuse_cache.proto.content import ContentError
from fuse_cache.proto.gpu_target import is_gpu_target
from fuse_cache.proto.limits import INLINE_BYTES
from fuse_cache.proto.request import RequestFields
from fuse_cache.proto.signing import SigningKey
from fuse_cache.server.builders import Builder
from fuse_cache.server.cache.facts import describe
from fuse_cache.server.cache.store import Store
from fuse_cache.server.cache.tier import TierError
from fuse_cache.server.checker import GraphChecker, ValidatorGaveUpError
from fuse_cache.server.epoch import Epoch
from fuse_cache.server.errors import RequestError
from fuse_cache.server.jobs import Event, Failure, Job, Jobs, Result, State
from fuse_cache.server.kept_graphs import KeptGraphs
from fuse_cache.server.key import KeyFields
from fuse_cache.server.metrics import Metrics
from fuse_cache.server.publish import Sealed, seal
from fuse_cache.server.spool import Upload
from fuse_cache.server.worker.pool import WorkerError
from fuse_cache.server.worker.protocol import Built, write_job_files
from fuse_cache.server.workfolder import WorkFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a job is to build, and under which fingerprints its key was made."""

    key: KeyFields
    request: RequestFields
    request_bytes: bytes
    epoch: Epoch
    builder: Builder
    model: str


PROOF = "fuse_cache.server.worker.proof:prove"
_DRAINING = Failure(reason="DRAINING", message="the daemon is stopping; ask another one, or compile locally")


class SourcesChanged(WorkerError):
    """What was or would be built is not what the key says. Asked again, it gets another key."""

    reason = "TOOLCHAIN_MISMATCH"


class Compiler:
    """Runs jobs, at most `workers` at a time. Everything happens in one event loop."""

    def __init__(
        self,
        *,
        jobs: Jobs,
        checker: GraphChecker,
        store: Store,
        work: WorkFolder,
        kept: KeptGraphs,
        signing_key: SigningKey,
        metrics: Metrics,
        workers: int,
        op_modules: tuple[str, ...],
    ) -> None:
        self._jobs = jobs
        self._checker = checker
        self._store = store
        self._work = work
        self._kept = kept
        self._signing_key = signing_key
        self._metrics = metrics
        self._workers = workers
        self._op_modules = op_modules
        self._orders: dict[
            bytes, tuple[Order, int]
        ] = {}  # key -> order, spooled bytes; from UPLOADED to the end
        self._running: set[asyncio.Task[None]] = set()
        self._checking: set[asyncio.Task[None]] = set()
        self._draining = False
        jobs.on_queued = self._fill

    @property
    def busy(self) -> int:
        """How many jobs are with a worker or the validator, or queued."""
        return len(self._orders)

    def take(self, job: Job, upload: Upload, order: Order) -> None:
        """Take over a job whose graph has come whole. From here on it depends on no caller."""
        if self._draining:  # Its call began before; who waits is told now, and the upload is thrown away.
            self._end(job, _DRAINING)
            return
        job.folder = upload.keep()
        self._orders[job.key] = (order, upload.size_bytes)
        self._jobs.apply(job, Event.UPLOADED)
        task = asyncio.create_task(self._check(job))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    async def drain(self, grace_s: float) -> None:
        """Refuse what waits, and give what runs `grace_s` seconds to end. Then it is killed."""
        self._draining = True
        for job in self._jobs:
            if job.state in (State.WANTED, State.QUEUED):
                self._end(job, _DRAINING)
        pending = self._running | self._checking
        if pending:
            _, pending = await asyncio.wait(pending, timeout=grace_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for job in self._jobs:
            self._end(job, _DRAINING)

    async def _check(self, job: Job) -> None:
        assert job.folder is not None
        try:
            await self._checker.check(job.folder / "graph")
        except RequestError as error:
            refused = error.code is not error.code.UNAVAILABLE
            if refused:
                self._metrics.rejected_graphs.labels(error.reason).inc()
            self._end(
                job,
                Failure(
                    reason=error.reason,
                    message=error.message,
                    stage="check",
                    refused=refused,
                    deterministic=refused and not isinstance(error, ValidatorGaveUpError),
                ),
            )
        except Exception as error:  # No descriptors left, a bug of ours: nobody may be left waiting.
            log.exception("a graph could not be checked")
            self._fail(job, "INTERNAL", f"{type(error).__name__}: {error}", "check", False)
        else:
            if self._draining:  # It was with the validator when what waits was refused.
                self._end(job, _DRAINING)
            elif not job.finished:
                self._jobs.apply(job, Event.ACCEPTED)

    def _fill(self) -> None:
        while len(self._running) < self._workers and (job := self._jobs.next_queued()) is not None:
            self._jobs.apply(job, Event.STARTED)
            task = asyncio.create_task(self._run(job))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("compiler task failed", exc_info=error)
        self._fill()

    async def _run(self, job: Job) -> None:
        order, _ = self._orders[job.key]
        try:
            result = await self._build(job, order)
        except WorkerError as error:
            self._fail(job, error.reason, error.message, error.stage, error.deterministic)
        except (ContentError, TierError) as error:
            self._fail(job, "STORE_FAILED", str(error), "seal", False)
        except asyncio.CancelledError:
            self._fail(job, "DRAINING", "the daemon stopped before the compilation ended", job.stage, False)
        except Exception as error:  # A bug of ours must not leave anybody waiting.
            log.exception("a compilation ended in a bug")
            self._fail(job, "INTERNAL", f"{type(error).__name__}: {error}", job.stage, False)
        else:
            self._metrics.compile_ends.labels("DONE").inc()
            if job.folder is not None:
                self._kept.keep(job.key, job.folder)
            self._close(job)
            self._jobs.apply(job, Event.BUILT, result=result)

    async def _build(self, job: Job, order: Order) -> Result:
        folder = job.folder
        assert folder is not None
        # An edit of the last second is noticed at the end; this look is to spare a build for nothing.
        await self._must_be_current(order, within_s=1.0)
        self._jobs.progress(job, "start", "precompiled headers")
        seed_dir = await order.builder.seeds.ready(order.epoch, order.request.target)
        self._jobs.progress(job, "start", "worker")
        await asyncio.to_thread(
            write_job_files,
            folder,
            job_id=job.job_id,
            request=order.request_bytes,
            op_modules=self._op_modules,
            seed_dir=seed_dir,
        )
        self._metrics.compiles.inc()
        began_s = time.monotonic()
        try:
            built = await order.builder.pool.run(
                job.job_id, folder, lambda stage, detail: self._jobs.progress(job, stage, detail)
            )
        finally:
            seconds = time.monotonic() - began_s
            self._metrics.compile_seconds.observe(seconds)
            self._metrics.seconds_spent.inc(seconds)
        if is_gpu_target(order.request.target):
            await self._prove(job, built, order)
        self._jobs.progress(job, "seal", "")
        began_s = time.monotonic()
        await self._must_be_current(order)
        result = await self._publish(built, order)
        self._metrics.publish_seconds.observe(time.monotonic() - began_s)
        log.info(
            "compiled",
            extra={
                "key": job.key.hex()[:12],
                "target": order.request.target,
                "seconds": round(seconds, 2),
                "bytes": len(built.content),
                "fusions": {r["name"]: r["matches"] for r in built.passes if r.get("matches")},
            },
        )
        return result

    async def _prove(self, job: Job, built: Built, order: Order) -> None:
        """Have a fresh worker load what was built, as a host would that can compile nothing."""
        self._jobs.progress(job, "prove", "")
        folder = await asyncio.to_thread(self._work.new_folder, "proof")
        try:
            await asyncio.to_thread((folder / "graph").write_bytes, built.content)
            await asyncio.to_thread(
                write_job_files, folder, job_id=folder.name, request=order.request_bytes, entry=PROOF
            )
            await order.builder.pool.run(folder.name, folder, lambda stage, detail: None)
        finally:
            await self._work.remove(folder)

    async def _must_be_current(self, order: Order, *, within_s: float = 0.0) -> None:
        """Make sure that the sources on disk are those that the key names: workers import from there."""
        epoch = await order.builder.freshness.look(within_s=within_s)
        if epoch.name != order.epoch.name:
            raise SourcesChanged(
                "passes, kernels or the toolchain changed on this daemon's disk meanwhile; ask again",
                stage="start",
            )

    async def _publish(self, built: Built, order: Order) -> Result:
        sealed = await asyncio.to_thread(self._seal, built, order)
        signed = sealed.signed.SerializeToString()
        published = await self._store.publish(
            signed, sealed.manifest.key, built.content, describe(sealed.manifest)
        )
        if published.lost:
            log.warning("not kept on disk", extra={"why": published.lost})
        inline = built.content if len(built.content) <= INLINE_BYTES else b""
        return Result(signed, sealed.manifest.content.digest, inline)

    def _seal(self, built: Built, order: Order) -> Sealed:
        return seal(
            built,
            key=order.key,
            request=order.request,
            epoch=order.epoch,
            signing_key=self._signing_key,
            model=order.model,
        )

    def _fail(self, job: Job, reason: str, message: str, stage: str, deterministic: bool) -> None:
        self._metrics.compile_ends.labels(reason).inc()
        log.warning(
            "compilation failed",
            extra={"key": job.key.hex()[:12], "reason": reason, "stage": stage, "why": message[:500]},
        )
        self._end(job, Failure(reason=reason, message=message, stage=stage, deterministic=deterministic))

    def _end(self, job: Job, failure: Failure) -> None:
        """End a job that has not ended yet: a drain may have been faster than who reports its failure."""
        if job.finished:
            return
        self._close(job)
        self._jobs.apply(job, Event.BROKE, failure=failure)

    def _close(self, job: Job) -> None:
        """Forget the order and remove the files, in the background."""
        found = self._orders.pop(job.key, None)
        if found is not None:
            self._work.release(found[1])
        if job.folder is not None:
            task = asyncio.create_task(self._work.remove(job.folder))
            self._checking.add(task)
            task.add_done_callback(self._checking.discard)
            job.folder = None
