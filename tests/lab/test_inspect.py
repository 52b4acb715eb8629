"""What an inspection says is what the passes did, and what transformers' own attention is."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
import torch

from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.inspection import Inspection, State, inspect
from samkv_integrations.methods import METHODS, Method
from tests.support.laws import CHUNKS, PROMPT, engine_of
from tests.support.models import FAMILIES, hf_model
from tests.support.records import COMPLETION_TEMPLATE, RECORDS, TEXTS

N_MISSED = 2


@cache
def engine(family: str = "llama", store_bits: int = 16) -> Engine:
    made = engine_of(family, store_bits)
    made.store.delete(*(made.key_of(text) for text in CHUNKS[-N_MISSED:]))
    return made


def seen_by(method: str | Method, **options: object) -> Inspection:
    given = {"method": method, "eviction": "none", "max_new_tokens": 4, **options}
    return inspect(engine(), PROMPT, CHUNKS, **given)  # type: ignore[arg-type]


def share(found: Inspection, *states: State) -> float:
    """Of the context's tokens, mean over layers."""
    context = found.states[:, found.chunk_of >= 0]
    return float(torch.stack([context == state for state in states]).any(0).float().mean())


@pytest.mark.parametrize("method", METHODS)
def test_the_states_are_those_of_the_report(method: str) -> None:
    found = seen_by(method)
    kept = share(found, State.KEPT, State.RECOMPUTED, State.MISSED)
    assert kept == pytest.approx(found.report.kept_ratio, abs=1e-6)
    computed = share(found, State.RECOMPUTED, State.MISSED)
    # what a later layer needs is computed at earlier ones too, where its stored entry stays
    assert computed <= found.report.recompute_ratio + 1e-6
    is_missed = (found.states == State.MISSED).all(0)
    assert torch.equal(is_missed, found.chunk_of >= len(CHUNKS) - N_MISSED)
    outside = (found.states == State.UNCACHED).all(0)
    assert torch.equal(outside, found.chunk_of < 0)


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_is_the_engine_s(method: str) -> None:
    found = seen_by(method)
    own = engine().generate(
        PROMPT, CHUNKS, method=method, eviction="none", max_new_tokens=4, on_miss="text"
    )
    full = engine().generate(PROMPT, CHUNKS, method="recompute", max_new_tokens=4)
    assert found.answer == own.text.strip()
    assert found.full_answer == full.text.strip()
    assert found.is_same == (found.answer == found.full_answer)
    assert (found.report.ran, found.report.kept_ratio) == (own.report.ran, own.report.kept_ratio)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_full_prefill_is_what_transformers_says(family: str) -> None:
    found = inspect(engine(family), PROMPT, CHUNKS, method="reuse", max_new_tokens=1)
    model = hf_model(family)
    model.set_attn_implementation("eager")
    with engine(family).resolve(PROMPT, CHUNKS) as resolved:
        ids = resolved.token_ids
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_attentions=True)
    expected = torch.stack([layer[0, :, -1].mean(0) for layer in output.attentions])
    torch.testing.assert_close(found.full_attention, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_attention_is_of_what_a_layer_sees_and_sums_to_one(method: str) -> None:
    found = seen_by(method)
    assert found.attention.shape == found.states.shape
    torch.testing.assert_close(found.attention.sum(1), torch.ones(found.n_layers))
    if METHODS[method].recompute.uses_caches:  # what is carried to another layer is seen there
        unseen = (found.states == State.DROPPED).all(0)
        assert float(found.attention[:, unseen].sum()) == 0


def test_tokens_have_their_text_and_their_chunk() -> None:
    found = seen_by("samkv-guided", names={CHUNKS[0]: "first.txt"}, title="why?")
    begin = "<|bos|>" if engine().model.bos_id is not None else ""
    assert "".join(found.pieces) == begin + PROMPT
    for index, text in enumerate(CHUNKS):
        own = (found.chunk_of == index).nonzero()[:, 0].tolist()
        assert "".join(found.pieces[at] for at in own) == text == found.chunks[index].text
        assert found.chunks[index].n_tokens == len(own)
    assert [chunk.name for chunk in found.chunks] == [
        "first.txt", "chunk 2", "chunk 3", "chunk 4", "chunk 5",
    ]  # fmt: skip


def test_figures_of_chunks_add_up() -> None:
    found = seen_by("samkv-fusion")
    for chunk in found.chunks[:-N_MISSED]:
        assert chunk.is_cached and chunk.kept + chunk.recomputed + chunk.dropped == pytest.approx(1)
    for chunk in found.chunks[-N_MISSED:]:
        assert (chunk.is_cached, chunk.kept, chunk.recomputed, chunk.dropped) == (False, 0, 0, 0)
    inside = found.full_attention[:, found.chunk_of >= 0].sum(1).mean()
    assert sum(chunk.full_attention for chunk in found.chunks) == pytest.approx(float(inside))
    assert found.report.chunk_misses == {"absent": N_MISSED}


def test_a_layer_or_all_of_them() -> None:
    found = seen_by("samkv-guided")
    assert [int(state) for state in found.state_at(1)] == found.states[1].tolist()
    anywhere = found.state_at()
    for token, state in enumerate(anywhere):
        if (found.states[:, token] == State.RECOMPUTED).any():
            assert state == State.RECOMPUTED
        else:
            assert (found.states[:, token] == state).any()
    for layer in (-1, found.n_layers):
        for of_layer in (found.state_at, found.chunks_at):
            with pytest.raises(InvalidOption, match=f"layer={layer}; it must be from 0 to"):
                of_layer(layer)


def test_nothing_is_stored_and_nothing_is_taken_from_earlier_prompts() -> None:
    asked = Engine(engine().model, method="samkv-guided")
    asked.cache_chunks(CHUNKS[:2])
    before = asked.store.keys()
    first = inspect(asked, PROMPT, CHUNKS, max_new_tokens=2)
    again = inspect(asked, PROMPT, CHUNKS, max_new_tokens=2)
    assert asked.store.keys() == before
    assert torch.equal(first.states, again.states)
    assert torch.equal(first.attention, again.attention)
    assert first.report.prefix_tokens == again.report.prefix_tokens == 0


def test_prompts_without_a_chunk_and_such_as_end_with_one() -> None:
    without = inspect(engine(), "Question: why?", [], method="samkv-guided", max_new_tokens=2)
    assert without.chunks == () and without.is_same
    assert {*without.state_at()} == {State.UNCACHED}
    assert "Outside chunks" in without.to_html()
    last = inspect(engine(), f"Read:\n{CHUNKS[0]}", CHUNKS[:1], method="reuse", max_new_tokens=2)
    assert last.state_at()[-1] == State.RECOMPUTED
    assert {*last.state_at()[:-1]} == {State.UNCACHED, State.KEPT}


def test_the_trained_model_looks_at_the_chunk_that_answers() -> None:
    asked = Engine.from_pretrained("builtin", store_bits=4)
    asked.cache_chunks(TEXTS)
    prompt = COMPLETION_TEMPLATE.format(
        context_str="\n\n".join(TEXTS), query_str=RECORDS[2].question
    )
    found = inspect(asked, prompt, TEXTS, method="samkv-guided", max_new_tokens=8)
    assert found.answer == found.full_answer == RECORDS[2].workers
    by_attention = sorted(found.chunks, key=lambda chunk: -chunk.full_attention)
    assert RECORDS[2].text in [chunk.text for chunk in by_attention[:2]]
    begin = "".join(found.pieces).index(RECORDS[2].workers)
    ends = accumulate(map(len, found.pieces))
    of_number = {
        state for state, end in zip(found.state_at(), ends, strict=True)
        if begin < end <= begin + len(RECORDS[2].workers)
    }  # fmt: skip
    assert State.RECOMPUTED in of_number
