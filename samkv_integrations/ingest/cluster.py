"""Ingest by several processes and machines, with Ray Data."""

from __future__ import annotations

import logging
import os
import pickle
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import PAGE_SIZE, IngestResult
from samkv_integrations.chunks.caching import progress_bar
from samkv_integrations.engine import Engine
from samkv_integrations.errors import ClusterError, Given, InvalidChunk, InvalidOption, MissingExtra
from samkv_integrations.frameworks.engine_args import ModelSource, engine_of
from samkv_integrations.runtimes import runtime_for
from samkv_integrations.store.chunk import ChunkRef

__all__ = ["ClusterIngest", "ModelSource", "WorkerPool", "add_on_ray", "cache_on_ray", "engine_of"]

PROBE = "which store"
"""Two processes that compute the same key of this text use the same store and model."""

MAX_RETRIES = 2
"""How often a batch whose worker ended is repeated before the ingest fails."""

_MAX_TASKS = 4096
"""Most tasks of an ingest. A task is one batch, unless there are more batches than this."""


@dataclass(frozen=True, kw_only=True)
class ClusterIngest(IngestResult):
    """The result of an ingest by several workers. n_records: texts that have caches now.

    failed: index of a text -> why its chunk has no cache.
    """

    failed: Mapping[int, str] = field(default_factory=dict)


OnPage = Callable[[range, Mapping[int, str]], None]
"""Called for a page: indices of its texts, and index -> reason for each text without a cache."""


def cache_on_ray(
    engine: Engine,
    source: ModelSource,
    texts: Sequence[str],
    pool: WorkerPool,
    *,
    on_page: OnPage | None = None,
    progress: bool = False,
) -> ClusterIngest:
    """Cache the chunks of ``texts`` by the workers of ``pool``, as `Engine.cache_chunks` does.

    The files have the same bytes for any number of workers. A text that cannot be cached does not
    stop the others. If an ingest ended early, the same call continues it.

    engine: the engine of this process. It finds out which caches are missing, and computes none.
    source: the plain values that ``engine`` was made of; workers make engines of the same values.
        All machines must reach its folder under the same path.
    on_page: called in this process, page by page, in order.

    Raises:
        InvalidOption: ``source`` holds an object that cannot be sent, or names no folder; or the
            cluster has no room for the workers.
        ClusterError: the workers fail, or the workers of one batch end again and again.
        StoreError: the store cannot be read.
        MissingExtra: Ray is not installed.
    """
    began, chunks = time.perf_counter(), engine.chunks
    sent = _sent(engine, source, pool)
    refs = chunks.refer(texts)
    failed: dict[int, str] = {}
    for place, ref in enumerate(refs):
        try:
            chunks.require_fit([ref])
        except InvalidChunk as error:
            failed[place] = str(error)
    sound = [place for place in range(len(refs)) if place not in failed]
    agreed = dict(zip(sound, chunks.agree([refs[place] for place in sound]), strict=True))

    # The last bits of a cache depend on the chunks that share its pass. So this process forms the
    # batches, as `ChromaLink.add` does, and idle workers do not.
    pages = [range(at, min(at + PAGE_SIZE, len(refs))) for at in range(0, len(refs), PAGE_SIZE)]
    work: list[list[list[ChunkRef]]] = []  # the batches of each page
    places_of: dict[str, list[int]] = {}
    for places in pages:
        new: list[ChunkRef] = []
        for place in places:
            if (found := agreed.get(place)) is not None:
                if found.key not in places_of:
                    new.append(found)
                places_of.setdefault(found.key, []).append(place)
        missed = [ref for ref in chunks.look_up(new) if ref.state == "missed"]
        work.append(engine.model.batches(missed))
    sent = sent.model_copy(update={"block_size": engine.fingerprint.block_size})
    given = sent, engine.key_of(PROBE)
    all_groups = [*chain.from_iterable(work)]
    missed_refs = [*chain.from_iterable(all_groups)]
    texts_of = [[ref.text for ref in group] for group in all_groups]
    n_cached = len(missed_refs)
    with (
        progress_bar(missed_refs, is_shown=progress) as bar,
        closing(_by_workers(pool, given, texts_of)) as results,
    ):
        for places, groups in zip(pages, work, strict=True):
            for group in groups:
                for at, why in pickle.loads(next(results)["failed"]).items():
                    n_cached -= 1
                    failed |= dict.fromkeys(places_of[group[at].key], why)
                bar.update(sum(len(ref.token_ids) for ref in group))
            if on_page is not None:
                on_page(places, {place: failed[place] for place in places if place in failed})
    missed_keys = {ref.key for ref in missed_refs}
    return ClusterIngest(
        n_records=len(refs) - len(failed),
        n_cached=n_cached,
        n_hit=sum(len(places) for key, places in places_of.items() if key not in missed_keys),
        failed=dict(sorted(failed.items())),
        n_evicted=sum(engine.store.is_evicted(key, engine.fingerprint) for key in places_of),
        bytes_on_disk=chunks.n_bytes(missed_refs),
        seconds=time.perf_counter() - began,
    )


def add_on_ray(
    link: ChromaLink,
    source: ModelSource,
    ids: Sequence[str],
    texts: Sequence[str],
    embeddings: Sequence[Sequence[float]],
    metadatas: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    pool: WorkerPool,
    progress: bool = False,
) -> ClusterIngest:
    """`ChromaLink.add` with the workers of ``pool``, which compute the caches.

    This process writes the records, page by page, once the caches of a page and of all pages before
    it exist. A text that cannot be cached gets no record; an older record with its id stays.

    Raises InvalidOption as `ChromaLink.add` does, and what `cache_on_ray` raises.
    """
    rows = link.check(ids, texts, embeddings, metadatas)

    def write(places: range, failed: Mapping[int, str]) -> None:
        if sound := [place for place in places if place not in failed]:
            link.add(
                [ids[at] for at in sound], [texts[at] for at in sound],
                [embeddings[at] for at in sound], [rows[at] for at in sound], build_missing=False,
            )  # fmt: skip

    return cache_on_ray(link.engine, source, texts, pool, on_page=write, progress=progress)


def _sent(engine: Engine, source: ModelSource, pool: WorkerPool) -> ModelSource:
    """The source for workers. Raises InvalidOption if a value cannot be sent."""
    for name in ("engine", "model", "tokenizer"):
        if getattr(source, name) is not None:
            raise InvalidOption(
                f"{name} is an object of this process, but workers load their own; give model_name"
            )
    if source.kv_dir is None:
        raise InvalidOption("kv_dir is missing; give a folder in which workers share chunk caches")
    if not pool.n_gpus and source.device_map not in (None, "auto", "cpu"):
        raise InvalidOption(
            f"device {source.device_map!r}, but workers have no GPU; give --worker-gpus 1, "
            "in Python WorkerPool(n_gpus=1)"
        )
    kind = runtime_for(source.model_name, source.runtime)
    if pool.n_gpus and source.dtype == "auto" and kind.name == "transformers":
        from samkv_integrations.runtimes.transformers.loading import bfloat16_is_slow, device_of

        if bfloat16_is_slow(device_of("cpu")):
            raise InvalidOption(
                Given("dtype", "auto"),
                " may choose another dtype on the workers' GPUs than on this machine; give "
                "'bfloat16' or 'float32'",
            )
    return source.model_copy(
        update={
            "kv_dir": os.path.abspath(source.kv_dir),
            "runtime": kind.name,
            "dtype": engine.model.dtype_name if "dtype" in kind.options else "auto",
            "device_map": source.device_map if pool.n_gpus else "cpu",
            "n_threads": pool.n_cpus,
        }
    )


def _by_workers(
    pool: WorkerPool, given: tuple[Any, ...], work: Sequence[Sequence[str]]
) -> Generator[Mapping[str, Any]]:
    """The result of each batch of texts, in order. Ray repeats a batch whose worker ended.

    given: the arguments of `CacheWorker`.
    """
    if not work:
        return
    # Ray warns if a worker asks for both.
    share = {"num_gpus": pool.n_gpus} if pool.n_gpus else {"num_cpus": pool.n_cpus}
    size = min(pool.n_workers, len(work))
    # pickled, because Arrow rejects some texts
    rows = [{"texts": pickle.dumps(texts)} for texts in work]
    with pool.connected() as ray:
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # Ray logs every step
        data = ray.data
        try:
            results = data.from_items(rows, override_num_blocks=min(len(rows), _MAX_TASKS)).map(
                CacheWorker,
                # one task each: a task that waits for a busy worker never moves to an idle one
                compute=data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
                fn_constructor_args=given,
                ray_remote_args_fn=lambda: {"max_task_retries": MAX_RETRIES},
                **share,
            )
            results.context.enable_progress_bars = False
            results.context.execution_options.preserve_order = True
            yield from results.iter_rows()
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"the ingest on Ray ended ({reason_in(str(error))}); what was cached stays, so "
                "restart it once the cluster works. If workers are killed again, give each more "
                "memory, or use smaller chunks"
            ) from error


# -- in a worker --------------------------------------------------------------------------------


class CacheWorker:
    """A process that loads the model once and caches the chunks of batches.

    source: plain values of model and store, with the agreed block size and the threads of passes.
    probe_key: key of `PROBE`.

    Raises InvalidOption if its model or its store is not that of the ingest.
    """

    def __init__(self, source: ModelSource, probe_key: str) -> None:
        here = f"on {platform.node()}"
        if source.kv_remote is None and not Path(str(source.kv_dir)).is_dir():  # else it is created
            raise InvalidOption(
                f"the folder {source.kv_dir} of chunk caches does not exist {here}; give one that "
                "all machines share under the same path"
            )
        self._engine = engine_of(source)
        if self._engine.key_of(PROBE) != probe_key:
            raise InvalidOption(
                f"the model {source.model_name!r} or the store {source.kv_dir} {here} is not the "
                "one that the ingest began with; give all machines the same files of the model, "
                "and one folder, or SAMKV_STORE_SECRET to all that share a remote tier"
            )

    def __call__(self, row: Mapping[str, bytes]) -> dict[str, Any]:
        """Cache the texts of a batch in one pass, or one by one if that fails.

        The resulting row has ``failed``: index in the batch -> why that chunk has no cache.
        """
        failed = dict[int, str]()
        chunks = self._engine.chunks
        # Also compute chunks that a killed worker has cached: the batch must stay the same.
        refs = [replace(ref, state="missed") for ref in chunks.refer(pickle.loads(row["texts"]))]
        try:
            chunks.compute(refs)
        except Exception:
            for place, ref in enumerate(chunks.look_up(refs)):
                try:
                    chunks.compute([ref])
                except Exception as error:
                    failed[place] = " ".join(f"{type(error).__name__}: {error}".split())
        return {"failed": pickle.dumps(failed)}


# -- the cluster --------------------------------------------------------------------------------

_ADDRESS = re.compile(r"[^/\s]+:[0-9]+")
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt): ")

_OWN_CLUSTER = {
    # Ray listens on all addresses of a machine, and runs any code that it receives.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else it logs the operations of Ray Data
}
"""Environment of a cluster that this process starts for itself. Variables that are set already win.
Ray reads them when it is imported."""


def require_ray() -> None:
    """Raises MissingExtra if Ray is not installed. Does not import it."""
    if find_spec("ray") is None:
        raise MissingExtra.of("ray", "ray")


def reason_in(message: str) -> str:
    """The cause in an error message of Ray, without its traceback and further lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if ours := [line for line in lines if line.startswith("samkv_integrations.errors.")]:
        return ours[-1].partition(": ")[2]
    errors = [line for line in lines if _ERROR.match(line)]
    return errors[-1] if errors else lines[0] if lines else "Ray does not say"


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """The number of workers and the resources of each. Each worker loads the model.

    n_cpus: processors of a worker, and threads of its passes.
    n_gpus: accelerators of a worker, also a fraction; 0 runs the model on the processor.
    address: that of a running Ray cluster; ``auto`` for the cluster of this machine; None for a
        cluster on this machine that starts and ends with the work. If this process is already
        connected to a cluster, that is used in any case.
    """

    n_workers: int = 2
    n_cpus: int = 1
    n_gpus: float = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_workers", 1), ("n_cpus", 1), ("n_gpus", 0)):
            value = getattr(self, name)
            if not value >= least or (least and type(value) is not int):
                raise InvalidOption(Given(name, value), f"; give a number of at least {least}")
        if self.address not in (None, "auto") and not _ADDRESS.fullmatch(str(self.address)):
            raise InvalidOption(
                Given("address", self.address), "; give HOST:PORT of a cluster, or 'auto'"
            )

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Ray, connected to a cluster with room for at least one worker.

        Raises:
            MissingExtra: Ray is not installed.
            InvalidOption: the cluster cannot be reached, or cannot hold a worker.
        """
        if self.address is None and "ray" not in sys.modules:
            for name, value in _OWN_CLUSTER.items():
                os.environ.setdefault(name, value)
        require_ray()
        import ray.data

        is_begun_here = not ray.is_initialized()
        if is_begun_here:
            self._connect(ray)
        try:
            # Ray would wait without end for a worker that no machine has room for.
            total = ray.cluster_resources()  # type: ignore[no-untyped-call]
            cpus, gpus = total.get("CPU", 0), total.get("GPU", 0)
            # A cluster may get further nodes; this machine cannot.
            n_needed = self.n_workers if self.address is None else 1
            if n_needed * self.n_cpus > cpus or n_needed * self.n_gpus > gpus:
                raise InvalidOption(
                    f"{self.n_workers} workers of {self.n_cpus} CPUs and {self.n_gpus:g} GPUs; Ray "
                    f"has {cpus:g} CPUs and {gpus:g} GPUs in all; give fewer or smaller ones"
                )
            yield ray
        finally:
            if is_begun_here:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:  # noqa: ANN401
        try:
            if self.address not in (None, "auto"):  # Ray would wait for minutes
                host, _, port = str(self.address).rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            ray.init(
                address=self.address or "local", log_to_driver=False, logging_level="ERROR",
                include_dashboard=None if self.address else False,
            )  # fmt: skip
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            why = (str(error).strip().splitlines() or [repr(error)])[0]
            raise InvalidOption(
                f"there is no Ray cluster at {self.address or 'this machine'!r} ({why}); start one "
                "with 'ray start --head', or leave the address out to start one here"
            ) from error
