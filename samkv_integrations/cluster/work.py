"""What is handed to a worker, and what it hands back."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Chunks that a worker looks after at once.

    number: counts the batches of an ingest. page: which page of its texts they stand in.
    texts: a text of each chunk. is_missed: whether none of them had a cache when the ingest began.
        They are computed in one pass then, so that it is the pass of a single process; else they
        are verified, and those whose cache is broken computed.
    """

    number: int
    page: int
    texts: tuple[str, ...]
    is_missed: bool


@dataclass(frozen=True, kw_only=True)
class BatchDone:
    """What became of a `Batch`.

    n_computed: chunks that were computed for it, by attempts that were cut off too.
    failed: place in the batch -> why that chunk has no cache.
    worker: node and process. began_at, ended_at: seconds since the epoch, by the worker's clock.
    cpu_s: processor seconds of all its threads.
    refusal: why the worker can do nothing at all; empty if it can.
    """

    number: int
    worker: str
    began_at: float
    ended_at: float
    cpu_s: float = 0.0
    n_computed: int = 0
    failed: Mapping[int, str] = field(default_factory=dict)
    refusal: str = ""


def to_row(item: Batch | BatchDone) -> dict[str, bytes]:
    """A row of a data set that holds ``item``: bytes, as columns would have to be told its type."""
    return {"item": pickle.dumps(item)}


def batch_in(row: Mapping[str, bytes]) -> Batch:
    """The batch that `to_row` wrote. Rows come from processes of the same cluster alone."""
    batch: Batch = pickle.loads(row["item"])
    return batch


def done_in(row: Mapping[str, bytes]) -> BatchDone:
    """Like `batch_in`, of what was done."""
    done: BatchDone = pickle.loads(row["item"])
    return done
