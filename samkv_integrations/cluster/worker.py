"""A worker: one process of a cluster that has loaded the model once and caches chunks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from samkv_integrations.cache.chunk import ChunkRef
from samkv_integrations.cluster.work import Batch, BatchDone, batch_in, to_row
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption, SamkvError, StoreError
from samkv_integrations.frameworks.engine_args import ModelSource, engine_of

MAX_ATTEMPTS = 3
"""Attempts at a batch, each of which a worker did not survive; the last one is chunk by chunk."""

PROBE = "which store"
"""A text whose key shows that two processes mean the same store and the same model."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker is made with.

    source: model and store, in plain values; its block size is settled. probe_key: key of `PROBE`.
    digest: of the fingerprint. n_threads: threads that torch may use.
    """

    source: ModelSource
    digest: str
    probe_key: str
    n_threads: int


class CacheWorker:
    """Caches the chunks of batches, one batch a call.

    Args:
        settings: see `WorkerSettings`.
        attempts: handle of the actor that counts, see `Attempts`.

    Nothing is raised here, or Ray would end the whole ingest: `BatchDone` says what went wrong.
    """

    def __init__(self, settings: WorkerSettings, attempts: Any) -> None:  # noqa: ANN401
        torch.set_num_threads(settings.n_threads)
        self._attempts = attempts
        self._engine: Engine | None = None
        self._refusal = ""
        try:
            self._engine = open_engine(settings)
        except Exception as error:
            self._refusal = f"{platform.node()}: {reason_of(error)}"

    def __call__(self, row: Mapping[str, bytes]) -> dict[str, bytes]:
        batch, began_at, cpu_before = batch_in(row), time.time(), time.process_time()
        n_computed, failed = 0, dict[int, str]()
        if self._engine is not None:
            attempt = self._call("begin", batch.number) or 1
            n_computed, failed = cache_batch(self._engine, batch, attempt)
            self._call("end", batch.number)
        done = BatchDone(
            number=batch.number,
            worker=f"{platform.node()}:{os.getpid()}",
            began_at=began_at,
            ended_at=time.time(),
            cpu_s=time.process_time() - cpu_before,
            n_computed=n_computed,
            failed=failed,
            refusal=self._refusal,
        )
        return to_row(done)

    def _call(self, method: str, number: int) -> int | None:
        """Tells the one who counts, whose machine may have gone: then nobody counts."""
        import ray

        with suppress(ray.exceptions.RayError):
            answer: int | None = ray.get(getattr(self._attempts, method).remote(number))
            return answer
        return None


def open_engine(settings: WorkerSettings) -> Engine:
    """The engine of a worker.

    Raises InvalidOption if it would make other caches than the ingest means, or put them elsewhere.
    """
    folder, remote = settings.source.kv_dir, settings.source.kv_remote
    if folder is not None and remote is None and not Path(folder).is_dir():  # made for nobody
        raise InvalidOption(
            f"the folder {folder} of chunk caches does not exist here; give one that all machines "
            "share under the same path"
        )
    engine = engine_of(settings.source)
    if engine.fingerprint.digest != settings.digest:
        raise InvalidOption(
            f"the model {settings.source.model_name!r} is not the one that the ingest began with: "
            "other weights, tokenizer or numbers; give all machines the same files"
        )
    if engine.key_of(PROBE) != settings.probe_key:
        raise InvalidOption(
            f"{folder} is another store here: it has another secret; give a folder that all "
            "machines share, or SAMKV_STORE_SECRET to all that share a remote tier"
        )
    return engine


def cache_batch(engine: Engine, batch: Batch, attempt: int = 1) -> tuple[int, dict[int, str]]:
    """Cache what is missing; how many chunks were computed, and why others were not, by place.

    attempt: which attempt at this batch it is; those before it ended a worker.
    """
    chunks = engine.chunks
    found = chunks.look_up(chunks.refer(batch.texts))
    missing = [ref for ref in found if ref.state == "missed"]
    if attempt > MAX_ATTEMPTS:
        why = f"{MAX_ATTEMPTS} workers ended while they computed it; give each more memory"
        failed = {ref.key: why for ref in missing}
    elif batch.is_missed and missing and attempt < MAX_ATTEMPTS:
        # All of them, or what is left would be computed in another pass than a single process
        # computes it in, whose numbers differ in their last bits.
        failed = _compute(engine, [replace(ref, state="missed") for ref in found])
    else:
        failed = _compute(engine, found, alone=attempt >= MAX_ATTEMPTS)
    n_tried = len(found) if batch.is_missed else len(missing)
    places = {place: failed[ref.key] for place, ref in enumerate(found) if ref.key in failed}
    return n_tried - len(places), places


def _compute(engine: Engine, found: Sequence[ChunkRef], *, alone: bool = False) -> dict[str, str]:
    """Compute the missed ones; key -> why it has no cache. alone: each in a pass of its own."""
    if not alone:
        try:
            engine.chunks.compute(found)
            return {}
        except StoreError as error:  # of the store: another pass would not help
            return {ref.key: reason_of(error) for ref in _without_cache(engine, found)}
        except Exception:  # one of them, perhaps, or all are too much at once
            pass
    failed: dict[str, str] = {}
    for ref in _without_cache(engine, found):
        try:
            engine.chunks.compute([ref])
        except Exception as error:
            failed[ref.key] = reason_of(error)
    return failed


def _without_cache(engine: Engine, found: Sequence[ChunkRef]) -> list[ChunkRef]:
    looked_up = engine.chunks.look_up(found)
    return [ref for ref in looked_up if ref.state == "missed"]


def reason_of(error: Exception) -> str:
    """An error as one line: ours as they are, others with their kind."""
    line = " ".join(str(error).split())
    return line if isinstance(error, SamkvError) else f"{type(error).__name__}: {line}"
