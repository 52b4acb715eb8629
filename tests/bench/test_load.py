"""Requests of the benchmark `serve`, one by one, and when they are due."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from benchmarks.load import Client, Endpoint, Prompt, Record, arrivals
from tests.support.openai_endpoint import Reply, openai_endpoint

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}


async def asked(url: str, prompt: Prompt = "Say.", method: str | None = None, **of: Any) -> Record:
    async with Client(Endpoint(url=url, **of)) as client:
        await client.pick_model()
        return await client.ask(prompt, label="m", index=3, method=method)


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


def test_arrivals_are_those_of_a_poisson_process_with_a_seed() -> None:
    moments = arrivals(4.0, 4000, seed=1)
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert moments == arrivals(4.0, 4000, seed=1) != arrivals(4.0, 4000, seed=2)
    assert min(gaps) > 0
    # mean and deviation of an exponential distribution are both 1 / rate; 4,000 gaps come within
    # 5 % of them but for three seeds in a thousand
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
