"""The query path of one prompt: what is computed, what is read, and what a broken cache costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.request import FirstToken, Request
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.guided import GuidedRecompute
from tests.support.asking import ask, first_token_by
from tests.support.covering import covering
from tests.support.laws import CHUNKS, FOLLOW, PROMPT, plain_logits
from tests.support.models import tiny_model

GUIDED = METHODS["samkv-guided"]
FEW = replace(GUIDED, recompute=GuidedRecompute(first=2))


@pytest.fixture(scope="module")
def engine() -> Engine:
    # what an earlier test has asked is not held: every answer computes its whole beginning
    engine = Engine(tiny_model("llama"), block_size=8, prefix_bytes=0)
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.fixture
def on_disk(tmp_path: Path) -> Engine:
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path), block_size=8)
    engine.cache_chunks(CHUNKS)
    return engine


def file_of(engine: Engine, tmp_path: Path, text: str) -> Path:
    (file,) = tmp_path.rglob(f"{engine.key_of(text)}.safetensors")
    return file


def spoil(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 255
    file.write_bytes(content)


# --- a value -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_first_token_is_a_value(engine: Engine, method: str) -> None:
    """Asked twice of the same open caches: the same to the bit, and the first one still goes on."""

    def twice(request: Request) -> FirstToken:
        one = first_token(request)
        kept = one.logits.clone()
        two = first_token(request)
        assert torch.equal(one.logits, kept) and torch.equal(two.logits, kept)
        assert one.cache is not two.cache and one.report.method == method
        compared.append(two)
        return one

    compared: list[FirstToken] = []
    first_token_by(twice, engine, PROMPT, CHUNKS, method, eviction=None)
    assert len(compared) == 1
    asked = [ask(engine, PROMPT, CHUNKS, method, eviction=None) for _ in range(2)]
    alone = asked[0].follow(FOLLOW[:4])
    later = [a.decoder() for a in (asked[1], ask(engine, PROMPT, CHUNKS, method, eviction=None))]
    with torch.inference_mode():  # two answers in turns, neither of which sees the other
        steps = [[d.step(token) for d in later] for token in FOLLOW[:4]]
    for expected, of_both in zip(alone, steps, strict=True):
        for found in of_both:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_ends_with_a_chunk_is_answered(engine: Engine, method: str) -> None:
    """Its last token is computed, and so has no stored key."""
    prompt = PROMPT[: PROMPT.index("\n\nQuestion")]
    asked = ask(engine, prompt, CHUNKS, method)
    assert bool(asked.first.logits.isfinite().all())
    assert not bool(asked.recomputed[:, -1].any())
    if method == "recompute":
        expected = plain_logits(engine.model, asked.layout)
        torch.testing.assert_close(asked.first.logits, expected, rtol=2e-4, atol=2e-4)


# --- broken caches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "broken"),
    covering([FEW, "reuse", "samkv-fusion", "cacheblend"], [[0], [3], [1, 4]], times=2),
)
def test_a_chunk_lost_on_the_way_is_computed_from_its_text(
    on_disk: Engine, tmp_path: Path, method: str | Method, broken: list[int]
) -> None:
    """The answer is that of a store without it, and what was read of it counts as read."""
    for index in broken:
        spoil(file_of(on_disk, tmp_path, CHUNKS[index]), -1)  # the last layer's last entry
    lost = ask(on_disk, PROMPT, CHUNKS, method, eviction=None)
    assert lost.report.chunk_misses == {"corrupt": len(broken)}
    assert lost.report.reused == len(CHUNKS) - len(broken)
    without = Engine(on_disk.model, block_size=8)
    without.cache_chunks(CHUNKS)
    for index in broken:
        without.store.delete(without.key_of(CHUNKS[index]))
    expected = ask(without, PROMPT, CHUNKS, method, eviction=None)
    # prefilled in the same batches, so that entries are the same to the bit
    assert torch.equal(lost.first.logits, expected.first.logits)
    assert torch.equal(lost.follow(FOLLOW), expected.follow(FOLLOW))
    for name in ("kept_ratio", "recompute_ratio", "context_tokens", "kv_bytes"):
        assert getattr(lost.report, name) == getattr(expected.report, name)


def test_every_chunk_lost_is_full_prefill(on_disk: Engine, tmp_path: Path) -> None:
    for text in CHUNKS:
        spoil(file_of(on_disk, tmp_path, text), -1)
    nothing = GuidedRecompute(first=0, matched=0, small_context=0)
    asked = ask(on_disk, PROMPT, CHUNKS, replace(GUIDED, recompute=nothing))
    assert asked.report.chunk_misses == {"corrupt": len(CHUNKS)}
    assert (asked.report.found, asked.report.reused) == (len(CHUNKS), 0)
    expected = plain_logits(on_disk.model, asked.layout)
    torch.testing.assert_close(asked.first.logits, expected, rtol=2e-4, atol=2e-4)
    assert asked.report.recompute_ratio == asked.report.kept_ratio == 1.0


@pytest.mark.parametrize("method", ["reuse-local", "ape"])
def test_a_prompt_that_ends_before_the_place_where_its_chunk_was_prefilled(method: str) -> None:
    """The prefix was longer than the rest of the prompt, and an IndexError came out."""
    engine = Engine(tiny_model("llama"), block_size=8, prefix_text="You are a helpful assistant.")
    engine.cache_chunks(CHUNKS[:1])
    logits = engine.logits(CHUNKS[0], method=method)
    assert logits.isfinite().all()
