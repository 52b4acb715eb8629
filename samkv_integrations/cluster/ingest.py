"""Caching many chunks by many workers, with Ray Data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from samkv_integrations.chroma.records import PAGE_SIZE
from samkv_integrations.cluster.attempts import Attempts
from samkv_integrations.cluster.plan import Plan
from samkv_integrations.cluster.pool import WorkerPool, errors_only
from samkv_integrations.cluster.work import BatchDone, done_in, to_row
from samkv_integrations.cluster.worker import PROBE, CacheWorker, WorkerSettings, reason_of
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import ClusterError, InvalidOption
from samkv_integrations.frameworks.engine_args import ModelSource
from samkv_integrations.model.loading import bfloat16_is_slow

if TYPE_CHECKING:
    from types import ModuleType

_MAX_TASKS = 4096
"""Tasks that an ingest is cut into at most. Each holds one batch, unless there are more."""

_LIVE = ("engine", "model", "tokenizer")
"""What a `ModelSource` may hold that is of one process."""


@dataclass(frozen=True, kw_only=True)
class ClusterIngest:
    """What one ingest by many workers did.

    n_records: texts whose chunks have caches now. n_cached: chunks that were computed. n_hit: texts
    whose chunk was cached before, or stood among them already. failed: place of a text -> why its
    chunk has no cache.
    n_retried: batches that were begun again, because their worker ended. n_evicted: chunks that had
    gone again at its end, for want of room. n_workers: processes that finished a batch.
    bytes_on_disk: what the caches that were missing take.
    seconds: in all. working_s: from the first batch's beginning to the last one's end, so without
    the start of the cluster and the loading of models. cpu_s: processor seconds of the worker that
    took most: what working_s would be if nothing else ran on its machine.
    """

    n_records: int
    n_cached: int
    n_hit: int
    failed: Mapping[int, str] = field(default_factory=dict)
    n_retried: int
    n_evicted: int
    n_workers: int
    bytes_on_disk: int
    seconds: float
    working_s: float
    cpu_s: float


OnPage = Callable[[range, Mapping[int, str]], None]
"""Called with the places of texts whose caches are there now, and those that have none, and why."""


def cache_on_ray(
    engine: Engine,
    source: ModelSource,
    texts: Sequence[str],
    pool: WorkerPool,
    *,
    on_page: OnPage | None = None,
    progress: bool = False,
) -> ClusterIngest:
    """Cache the chunks of ``texts``, as `Engine.cache_chunks` does, by the workers of ``pool``.

    The files have the same bytes whatever the number of workers, and whichever of them are killed.
    A text that can have no cache does not keep the others from theirs. What was done when the
    ingest is interrupted, the next one finds.

    engine: of this process; it reads texts and finds out what is missing, and computes nothing.
    source: what ``engine`` was made of, in plain values, which workers make theirs of. Its folder
        must be the same one for all machines, under the same path.
    on_page: called in this process, page by page and in order.

    Raises:
        InvalidOption: ``source`` holds what cannot be sent, or has no folder; or the cluster has
            no room for the workers.
        ClusterError: the workers cannot do their work.
        StoreError: the store cannot be read.
        MissingExtra: Ray is not installed.
    """
    began = time.perf_counter()
    settings = _settings_of(engine, source, pool)
    plan = Plan.of(engine, texts, PAGE_SIZE)
    settings = _agreed(settings, engine)
    tally = _Tally(plan, on_page)
    if plan.batches:
        with (
            pool.connected() as ray,
            tqdm(total=plan.n_chunks, desc="caching chunks", disable=not progress) as bar,
        ):
            attempts = ray.remote(num_cpus=0, max_restarts=0)(Attempts).remote()
            with closing(_work(ray, plan, settings, pool, attempts)) as work:
                for done in work:
                    tally.take(done)
                    bar.update(len(plan.batches[done.number].texts))
            tally.n_retried = _n_retried(ray, attempts)
    tally.require_all()
    return tally.result(engine, time.perf_counter() - began)


def _settings_of(engine: Engine, source: ModelSource, pool: WorkerPool) -> WorkerSettings:
    for name in _LIVE:
        if getattr(source, name) is not None:
            raise InvalidOption(
                f"{name} is loaded in this process, and workers load their own; give model_name"
            )
    if source.kv_dir is None:
        raise InvalidOption("kv_dir is needed: workers keep chunk caches in a folder they share")
    if not pool.n_gpus and source.device_map not in ("auto", "cpu"):
        raise InvalidOption(
            f"device {source.device_map!r} for workers without a GPU; say how many each has"
        )
    if pool.n_gpus and source.dtype == "auto" and bfloat16_is_slow(torch.device("cpu")):
        raise InvalidOption(
            "dtype='auto' may mean another one on a GPU of the workers than on this machine; give "
            "bfloat16 or float32"
        )
    sent = replace(
        source,
        kv_dir=os.path.abspath(source.kv_dir),
        dtype=engine.model.dtype_name,
        device_map=source.device_map if pool.n_gpus else "cpu",
    )
    return WorkerSettings(source=sent, digest="", probe_key="", n_threads=pool.n_cpus)


def _agreed(settings: WorkerSettings, engine: Engine) -> WorkerSettings:
    """With what workers are checked against, once the block size is settled."""
    fingerprint = engine.fingerprint
    return replace(
        settings,
        source=replace(settings.source, block_size=fingerprint.block_size),
        digest=fingerprint.digest,
        probe_key=engine.key_of(PROBE),
    )


def _work(
    ray: ModuleType,
    plan: Plan,
    settings: WorkerSettings,
    pool: WorkerPool,
    attempts: Any,  # noqa: ANN401
) -> Generator[BatchDone]:
    """What workers have done, in any order. A task whose worker ends is begun again by Ray."""
    data, n_batches = ray.data, len(plan.batches)
    rows = [to_row(batch) for batch in plan.batches]
    # Ray warns of both together; a worker with an accelerator asks for that.
    share = {"num_gpus": pool.n_gpus} if pool.n_gpus else {"num_cpus": pool.n_cpus}
    # its plans, line by line, and that it shows no bar
    with errors_only("ray.data"), _ray_errors(ray):
        work = data.from_items(rows, override_num_blocks=min(n_batches, _MAX_TASKS)).map(
            CacheWorker,
            # one task at a time: what waits at a worker is kept from one that is idle
            compute=data.ActorPoolStrategy(
                size=min(pool.n_workers, n_batches), max_tasks_in_flight_per_actor=1
            ),
            fn_constructor_kwargs={"settings": settings, "attempts": attempts},
            **share,
        )
        work.context.enable_progress_bars = False
        for row in work.iter_rows():
            yield done_in(row)


@contextmanager
def _ray_errors(ray: ModuleType) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the ingest on Ray ended ({reason_of(error)}); what was cached stays, so begin it "
            "again once the cluster works"
        ) from error


def _n_retried(ray: ModuleType, attempts: Any) -> int:  # noqa: ANN401
    try:
        n_retried: int = ray.get(attempts.n_retried.remote())
    except ray.exceptions.RayError:  # the machine of who counted has gone
        return 0
    return n_retried


class _Tally:
    """What has been done of a plan, and which pages that completes."""

    def __init__(self, plan: Plan, on_page: OnPage | None) -> None:
        self._plan = plan
        self._on_page = on_page
        self._left = [0] * len(plan.pages)
        for batch in plan.batches:
            self._left[batch.page] += 1
        self._done: dict[int, BatchDone] = {}
        self._next_page = 0
        self._failed_keys: dict[str, str] = {}
        self._key_of = {ref.text: ref.key for ref in plan.refs if ref is not None}
        self.n_retried = 0

    def take(self, done: BatchDone) -> None:
        """Count what a worker did. Raises ClusterError if it can do nothing."""
        if done.refusal:
            raise ClusterError(f"a worker cannot begin: {done.refusal}")
        if done.number in self._done:
            return
        batch = self._plan.batches[done.number]
        self._done[done.number] = done
        self._failed_keys |= {
            self._key_of[batch.texts[place]]: why for place, why in done.failed.items()
        }
        self._left[batch.page] -= 1
        self._tell()

    def _tell(self) -> None:
        """In order: a chunk of a later page may stand in an earlier one too."""
        while self._next_page < len(self._left) and not self._left[self._next_page]:
            places = self._plan.pages[self._next_page]
            self._next_page += 1
            if self._on_page is not None:
                self._on_page(places, self._failed(places))

    def _failed(self, places: Iterable[int]) -> dict[int, str]:
        """Place of a text -> why it has no cache."""
        failed = {}
        for place in places:
            ref = self._plan.refs[place]
            if ref is None:
                failed[place] = self._plan.failed[place]
            elif ref.key in self._failed_keys:
                failed[place] = self._failed_keys[ref.key]
        return failed

    def require_all(self) -> None:
        """Tells of pages without work; raises ClusterError if Ray lost a batch."""
        if lost := len(self._plan.batches) - len(self._done):
            raise ClusterError(
                f"Ray ended without {lost} of {len(self._plan.batches)} batches; begin again, what "
                "was cached stays"
            )
        self._tell()

    def result(self, engine: Engine, seconds: float) -> ClusterIngest:
        done, plan = [*self._done.values()], self._plan
        n_cached = sum(one.n_computed for one in done)
        failed = self._failed(range(len(plan.refs)))
        n_records = len(plan.refs) - len(failed)
        keys = {ref.key for ref in plan.refs if ref is not None}
        cpu_s: dict[str, float] = {}
        for one in done:
            cpu_s[one.worker] = cpu_s.get(one.worker, 0.0) + one.cpu_s
        began = min((one.began_at for one in done), default=0.0)
        return ClusterIngest(
            n_records=n_records,
            n_cached=n_cached,
            n_hit=n_records - n_cached,
            failed=failed,
            n_retried=self.n_retried,
            n_evicted=sum(engine.store.is_evicted(key, engine.fingerprint) for key in keys),
            n_workers=len({one.worker for one in done}),
            bytes_on_disk=engine.chunks.n_bytes(plan.missed),
            seconds=seconds,
            working_s=max((one.ended_at for one in done), default=0.0) - began,
            cpu_s=max(cpu_s.values(), default=0.0),
        )
