"""Requests of the benchmark `serve`, one by one and at once, against a server of the tests."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.load import Client, Endpoint, Prompt, Record, Send, arrivals, closed_loop, open_loop
from tests.support.openai_endpoint import Reply, openai_endpoint

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}


async def asked(url: str, prompt: Prompt = "Say.", method: str | None = None, **of: Any) -> Record:
    async with Client(Endpoint(url=url, **of)) as client:
        await client.pick_model()
        return await client.ask(prompt, label="m", index=3, method=method)


# -- one request --------------------------------------------------------------------------------


async def test_an_answer_is_timed_and_its_tokens_are_those_of_the_server() -> None:
    report = {"ran": "recompute", "wait_s": 0.25}
    with openai_endpoint(lambda body: Reply(usage=USAGE, report=report)) as server:
        record = await asked(server.url, method="auto")
    assert (record.error, record.label, record.index) == (None, "m", 3)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (9, 5, 4)
    assert record.report == report
    assert record.ttft_s is not None and len(record.gaps_s) == 2
    assert 0 < record.ttft_s + sum(record.gaps_s) <= record.total_s
    assert record.token_s == sum(record.gaps_s) / 3
    (body,) = server.bodies("completions")
    assert body == {
        "model": "fake", "prompt": "Say.", "max_tokens": 16, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "samkv": {"method": "auto"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "kind", "message", "n_texts"),
    [
        (Reply(status=429), "429", "no 429", 0),
        (Reply(status=400), "400", "no 400", 0),
        (Reply(ends=False), "cut", "the stream ended before its [DONE]", 3),
        (Reply(ends=False, breaks=True), "cut", "RemoteProtocolError", 3),
        (Reply(lines=['data: {"error": {"message": "late"}}']), "stream", "late", 3),
        (Reply(lines=["data: nothing"]), "malformed", "JSONDecodeError", 3),
        (Reply(lines=["data: []", "data: [3]"]), "malformed", "AttributeError", 3),
    ],
)
async def test_what_goes_wrong_is_named(
    reply: Reply, kind: str, message: str, n_texts: int
) -> None:
    with openai_endpoint(lambda body: reply) as server:
        record = await asked(server.url)
    assert record.error == kind
    assert record.message.startswith(message)
    assert record.completion_tokens == n_texts


async def test_an_answer_that_trickles_past_the_time_is_a_timeout() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:  # never silent for as long as httpx would allow
                writer.write(b": still here\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Client(
        Endpoint(url=f"http://127.0.0.1:{port}/v1", model="m", timeout_s=0.1)
    ) as client:
        record = await client.ask("Say.", label="m", index=0)
    server.close()
    assert record.error == "timeout"


# -- what comes before --------------------------------------------------------------------------


# -- many requests ------------------------------------------------------------------------------


class Sender:
    """Sends that take a few turns of the loop, and know how many were under way at once."""

    def __init__(self, n: int) -> None:
        self.sends: Sequence[Send] = [self._of(index) for index in range(n)]
        self.running = self.peak = 0
        self.due: dict[int, float | None] = {}

    def _of(self, index: int) -> Send:
        async def send(due: float | None) -> Record:
            self.due[index] = due
            self.running += 1
            self.peak = max(self.peak, self.running)
            for _ in range(index % 3 + 1):  # some overtake others
                await asyncio.sleep(0)
            self.running -= 1
            return Record(label="m", index=index)

        return send


@pytest.mark.parametrize("n_clients", [1, 3, 8])
async def test_a_closed_loop_keeps_its_clients_busy_and_sends_everything_once(
    n_clients: int,
) -> None:
    sender = Sender(11)
    records = await closed_loop(sender.sends, n_clients)
    assert sorted(record.index for record in records) == list(range(11))
    assert sender.peak == n_clients
    assert set(sender.due.values()) == {None}


async def test_an_open_loop_sends_each_when_it_is_due() -> None:
    sender, delays = Sender(4), [0.03, 0.0, 0.01, 0.02]
    began = time.perf_counter()
    records = await open_loop(sender.sends, delays)
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert list(sender.due) == [1, 2, 3, 0]
    for index, delay in enumerate(delays):
        due = sender.due[index]
        assert due is not None
        start = due - delay
        assert start >= began
        assert start == pytest.approx((sender.due[1] or 0) - delays[1])


def test_arrivals_are_those_of_a_poisson_process_with_a_seed() -> None:
    moments = arrivals(4.0, 4000, seed=1)
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert moments == arrivals(4.0, 4000, seed=1) != arrivals(4.0, 4000, seed=2)
    assert min(gaps) > 0
    # mean and deviation of an exponential distribution are both 1 / rate; 4,000 gaps come within
    # 5 % of them but for three seeds in a thousand
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
