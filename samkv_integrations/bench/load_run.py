"""A run of load: methods in turns on the same prompts, at one pace after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from samkv_integrations.bench.load import (
    Client,
    Record,
    Send,
    arrivals,
    closed_loop,
    open_loop,
)
from samkv_integrations.bench.load_prompts import Prompts
from samkv_integrations.errors import InvalidOption

AS_SERVED = "as-served"
"""Label of an endpoint that knows no methods."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How requests come: from so many clients that wait for answers, or so many a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None)
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidOption(f"concurrency={self.concurrency}; it must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidOption(f"rate={self.rate:g}; it must be above 0 requests a second")

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.concurrency is None else f"{self.concurrency} clients"


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent. labels: methods, or `AS_SERVED` alone.

    requests: of each label at each pace, in so many ``rounds``. seed: of the arrivals.

    Raises InvalidOption for what cannot be sent.
    """

    labels: tuple[str, ...]
    paces: tuple[Pace, ...]
    requests: int = 32
    rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise InvalidOption(f"methods {', '.join(self.labels)!r}; name each once, at least one")
        if not self.paces:
            raise InvalidOption("no pace is given; give --concurrency 8, or --rate 2")
        if self.rounds < 1:
            raise InvalidOption(f"rounds={self.rounds}; it must be at least 1")
        least = max(pace.concurrency or 1 for pace in self.paces) * self.rounds
        if self.requests < least:
            raise InvalidOption(
                f"requests={self.requests} in rounds={self.rounds}; so many clients are only busy "
                f"with {least} requests or more"
            )

    @property
    def n_prompts(self) -> int:
        """Prompts of a label: those of each pace, and one to warm up."""
        return len(self.paces) * self.requests + 1

    def indices(self, n_pace: int, n_round: int) -> range:
        """The prompts of a round of a pace; the first one of all warms up."""
        first = 1 + n_pace * self.requests
        begin, end = (self.requests * n // self.rounds for n in (n_round, n_round + 1))
        return range(first + begin, first + end)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The requests of one label in one round, sent while no others were. duration_s: of all."""

    label: str
    pace: Pace
    round: int
    duration_s: float
    records: tuple[Record, ...]


async def run(
    config: LoadConfig,
    client: Client,
    prompts: Prompts,
    on_record: Callable[[Pace, Record], None] = lambda pace, record: None,
) -> list[Block]:
    """Send everything, and return it in the order in which it was sent.

    Each label has the endpoint to itself for a block of requests, then the next one sends the same
    prompts at the same pace; every second round goes through the labels backwards, so that a
    machine that gets slower or faster does so for all. One request of each label before all
    others does not count.

    Raises InvalidOption if one of those is not answered, as then no other would be.
    """
    for label in config.labels:
        first = await _send(client, prompts, label, 0, None)
        if first.error:
            raise InvalidOption(
                f"the first request to {client.endpoint.url} ({label}) was not answered "
                f"({first.error}: {first.message}); mend that, and start again"
            )
    blocks = []
    for n_pace, pace in enumerate(config.paces):
        for n_round in range(config.rounds):
            for label in config.labels[:: -1 if n_round % 2 else 1]:
                sends = [
                    _reported(partial(_send, client, prompts, label, index), pace, on_record)
                    for index in config.indices(n_pace, n_round)
                ]
                began = time.perf_counter()
                records = await _at(pace, sends, config.seed + n_round)
                blocks.append(Block(
                    label=label, pace=pace, round=n_round, records=tuple(records),
                    duration_s=time.perf_counter() - began,
                ))  # fmt: skip
    return blocks


async def _at(pace: Pace, sends: Sequence[Send], seed: int) -> list[Record]:
    if pace.concurrency is not None:
        return await closed_loop(sends, pace.concurrency)
    assert pace.rate is not None
    return await open_loop(sends, arrivals(pace.rate, len(sends), seed))


async def _send(
    client: Client, prompts: Prompts, label: str, index: int, due: float | None
) -> Record:
    method = None if label == AS_SERVED else label
    prompt = prompts.by_label[label][index]
    return await client.ask(prompt, label=label, index=index, method=method, due=due)


def _reported(send: Send, pace: Pace, on_record: Callable[[Pace, Record], None]) -> Send:
    async def sent(due: float | None) -> Record:
        record = await send(due)
        on_record(pace, record)
        return record

    return sent
