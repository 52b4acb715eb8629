"""The methods of other papers: each one's choice against a slow version that says what it does.

Where a choice depends on what the model computed, the slow version takes it from the plain forward
of transformers, by hooks, and rotates and sums by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.base import RecomputeNone, Select, SelectAll
from samkv_integrations.methods.baselines import RecomputeAll
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.prompt.layout import Layout, Mask
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.a3 import A3Recompute
from samkv_integrations.runtimes.transformers.papers.ape import ApeAttention
from samkv_integrations.runtimes.transformers.papers.base import SelectionInputs
from samkv_integrations.runtimes.transformers.papers.cacheblend import CacheblendRecompute
from samkv_integrations.runtimes.transformers.papers.multi_infllm import MultiInfllmSelect
from samkv_integrations.runtimes.transformers.papers.samkv import SamkvRecompute, SamkvSelect, fuse
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.windows import MIN_RUN
from tests.support.chunks import cache_of, decoded
from tests.support.covering import covering
from tests.support.laws import (
    CHUNKS,
    FROM_THE_START,
    PROMPT,
    changed,
    first_logits,
    mixed,
    shared_engine,
)
from tests.support.layouts import layout_of
from tests.support.models import FAMILIES, tiny_model, turned
from tests.support.tensors import sets

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def projected(model: Model, layer: int, ids: Tensor) -> dict[str, Tensor]:
    """(T, heads, D) query, key (both before RoPE) and value of a layer, in transformers' own pass
    over ``ids``."""
    attn = model.hf.model.layers[layer].self_attn
    heads = {"q": model.n_heads, "k": model.n_kv_heads, "v": model.n_kv_heads}
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: object, inputs: object, output: Tensor) -> None:
            found[name] = output.reshape(len(ids), heads[name], model.head_dim)

        return hook

    hooks = []
    for name in heads:
        of_head = getattr(attn, f"{name}_norm", None)
        module = getattr(attn, f"{name}_proj") if of_head is None else of_head
        hooks.append(module.register_forward_hook(keep(name)))
    with torch.inference_mode():
        model.hf(ids[None])
    for hook in hooks:
        hook.remove()
    return found


def cached_entries(engine: Engine, layout: TensorLayout, texts: list[str]) -> tuple[Tensor, Tensor]:
    """(L, Tctx, G, D) un-rotated keys, and values, as the chunk caches hold them."""
    caches = [cache_of(engine, text) for text in texts]
    keys, values = (torch.cat(side, dim=1) for side in zip(*map(decoded, caches), strict=True))
    assert keys.shape[1] == layout.n_context
    return keys, values


def not_exact(layout: TensorLayout) -> list[int]:
    """Context tokens that may be computed again."""
    return [
        t for t, chunk in enumerate(layout.chunk_of_token.tolist()) if not bool(layout.exact[chunk])
    ]


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda t: -scores[t])[:count])


PROMPTS = {"after a text": PROMPT, "exact first chunk": FROM_THE_START}


@pytest.mark.parametrize(
    ("family", "layer", "prompt"), covering(FAMILIES, [1, 2], list(PROMPTS), times=2)
)
def test_cacheblend_computes_where_values_deviate_most(
    family: str, layer: int, prompt: str
) -> None:
    """What layers up to the check see is full prefill, so its values are those of transformers."""
    engine = shared_engine(family, 16)
    _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, changed("cacheblend", layer=layer))
    layout = query.layout
    values = projected(engine.model, layer, layout.token_ids)["v"]
    _, cached = cached_entries(engine, layout, CHUNKS)
    deviation = {}
    for t in not_exact(layout):
        new = values[int(layout.context_positions[t])].flatten().tolist()
        old = cached[layer, t].flatten().tolist()
        deviation[t] = sum((a - b) ** 2 for a, b in zip(new, old, strict=True))
    count = math.ceil(0.15 * layout.n_context)
    up_to, after = set(not_exact(layout)), best(deviation, count)
    assert len(after) == count < len(up_to)
    n_layers = engine.model.n_layers
    expected = [up_to if n <= layer else after for n in range(n_layers)]
    assert sets(query.recomputed) == expected
    assert query.report.recompute_ratio == pytest.approx(
        sum(map(len, expected)) / n_layers / layout.n_context
    )
    assert query.report.kept_ratio == 1.0


@pytest.mark.parametrize(
    ("family", "layer", "prompt"), covering(FAMILIES, [0, 1, 2], list(PROMPTS), times=2)
)
def test_a3_computes_what_the_question_attends_to(family: str, layer: int, prompt: str) -> None:
    """By a softmax over the context that may be computed again, head by head and token by token."""
    engine = shared_engine(family, 16)
    model = engine.model
    _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, changed("a3", layer=layer))
    layout = query.layout
    made = projected(model, layer, layout.token_ids)
    n_question = len(PROMPTS[prompt]) - PROMPTS[prompt].index("\n\nQuestion")
    tokens = not_exact(layout)
    places = layout.context_positions.tolist()
    keys = {t: turned(made["k"][places[t]], places[t], model).tolist() for t in tokens}
    attention = dict.fromkeys(tokens, 0.0)
    for row in range(layout.n_tokens - n_question, layout.n_tokens):
        asking = turned(made["q"][row], row, model).tolist()
        for h, head in enumerate(asking):
            group = h * model.n_kv_heads // model.n_heads
            logits = [dot(head, keys[t][group]) / math.sqrt(model.head_dim) for t in tokens]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for t, weight in zip(tokens, weights, strict=True):
                attention[t] += weight / sum(weights)
    count = math.ceil(0.15 * layout.n_context)
    expected = [
        set(tokens) if n <= layer else best(attention, count) for n in range(model.n_layers)
    ]
    assert sets(query.recomputed) == expected
    assert query.report.recompute_ratio == pytest.approx(
        sum(map(len, expected)) / model.n_layers / layout.n_context
    )


def test_epic_by_hand() -> None:
    """The first chunk is exact here."""
    layout = layout_of((5, 6, 20))
    assert np.flatnonzero(EpicRecompute(first=2).choose(layout)).tolist() == [5, 6, 11, 12]
    assert np.flatnonzero(EpicRecompute(first=7).choose(layout)).tolist() == [*range(5, 18)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_epic_reports_what_it_computes(prompt: str) -> None:
    engine, exact = shared_engine("llama", 16), prompt != "after a text"
    for first in (16, 3, 0):
        method = changed("epic", first=first)
        _, query = first_logits(engine, PROMPTS[prompt], CHUNKS, method)
        count = sum(min(len(t), first) for t in CHUNKS[int(exact) :])
        report = query.report
        assert report.recompute_ratio == pytest.approx(count / query.layout.n_context)
        assert report.kept_ratio == 1.0 and report.probe_s == 0.0


def test_multi_infllm_takes_the_best_blocks_of_each_chunk_by_itself() -> None:
    """Half of 40 tokens is five blocks of four, three of them anchors."""
    layout = TensorLayout(layout_of((40, 40, 40)))
    means = torch.zeros(1, 30, 1, 1)
    # of the second chunk all score higher, which takes no room from the others
    means[0, [3, 6, 11, 14, 17, 22, 24], 0, 0] = torch.tensor([2.0, 1, 100, 300, 200, 2, 1])
    inputs = SelectionInputs(n_layers=1, block_means=means)
    select = MultiInfllmSelect(max_kept_ratio=0.5)
    anchors = {0, 8, 9, 10, 18, 19, 20, 28, 29}
    keep = select.choose(torch.ones(1, 1, 1), inputs, layout)
    assert sets(keep) == [anchors | {3, 6, 14, 17, 22, 24}]
    assert torch.equal(select.probe_blocks(layout), layout.is_anchor)


def test_ape_merges_two_softmaxes() -> None:
    """Two keys of the context, of logits log 2 and 0, and one other of logit 0, by temperature 0.5:

    the context's weights are 4/5 and 1/5, its mass is (4 + 1)^scale against the other's 1.
    """
    query = torch.tensor([[[[1.0]]]]).expand(1, 2, 1, 1)  # two heads that share the keys
    keys = torch.tensor([[[[math.log(2)], [0.0], [0.0]]]])
    values = torch.eye(3)[None, None]
    flags = torch.tensor([True, True, False])
    for scale, mass in ((1.0, 5.0), (2.0, 25.0), (0.0, 1.0)):
        attend = ApeAttention(temperature=0.5, scale=scale)
        expected = torch.tensor([0.8 * mass, 0.2 * mass, 1.0]) / (mass + 1)
        found = attend(query, keys, values, 1.0, None, flags)
        torch.testing.assert_close(found, expected.expand(1, 2, 1, 3))
    hidden = torch.tensor([[True, False, True]])
    found = attend(query.bfloat16(), keys, values, 1.0, hidden, flags)
    assert found.dtype == torch.bfloat16 and found[0, 0, 0].tolist() == [0.5, 0.0, 0.5]


def test_ape_reads_its_shared_prefix_once() -> None:
    """Chunks are prefilled after the prefix text, which stands in the prompt once, uncached."""
    system = "You answer briefly.\n\n"
    engine = Engine(tiny_model("llama"), block_size=8, prefix_text=system)
    engine.cache_chunks(CHUNKS)
    _, query = first_logits(engine, system + FROM_THE_START, CHUNKS, "ape")
    layout = query.layout
    n_prefix = len(system) + 1  # BOS
    assert layout.n_prefix == n_prefix and bool(layout.uncached[:n_prefix].all())
    assert layout.prefilled_positions.tolist() == [
        n_prefix + i for text in CHUNKS for i in range(len(text))
    ]
    keys, _ = cached_entries(engine, layout, CHUNKS)
    for token in (0, 89, 90, 200):
        place, at = int(layout.context_positions[token]), int(layout.prefilled_positions[token])
        expected = turned(keys[2, token], at, engine.model)
        torch.testing.assert_close(query.cache.keys[2][place], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "option", "value", "allowed"),
    [
        (MultiInfllmSelect, "max_kept_ratio", 1.5, "between 0 and 1"),
        (SamkvSelect, "max_kept_ratio", -0.01, "between 0 and 1"),
        (CacheblendRecompute, "ratio", None, "between 0 and 1"),
        (A3Recompute, "ratio", math.inf, "between 0 and 1"),
        (A3Recompute, "layer", -3, "0 or more"),
        (EpicRecompute, "first", -2, "0 or more"),
        (ApeAttention, "temperature", 0, "above 0"),
        (ApeAttention, "scale", -0.1, "0 or more"),
        (GuidedRecompute, "matched", -1, "0 or more"),
        (GuidedRecompute, "matched", True, "whole number"),
        (GuidedRecompute, "matched", 10**30, "at most"),
        (GuidedRecompute, "first", None, "whole number"),
        (GuidedRecompute, "first", 1.5, "whole number"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(
    part: type, option: str, value: object, allowed: str
) -> None:
    with pytest.raises(InvalidOption) as raised:
        part(**{option: value})
    assert f"{option}={value!r}" in str(raised.value)
    assert allowed in str(raised.value)


@pytest.mark.parametrize(
    "needs", [frozenset(("values",)), "block_means", ["block_means"], lambda _: frozenset()]
)
def test_a_need_that_does_not_exist_lists_those_that_do(needs: object) -> None:
    class Needy(SelectAll):
        needs = "it is set below"  # type: ignore[assignment]

    Needy.needs = needs  # type: ignore[assignment, method-assign]
    known = "needs=.*of select.*out of anchor_mean, block_means, local_query, statistics$"
    with pytest.raises(InvalidOption, match=known):
        replace(METHODS["reuse"], select=Needy())


@pytest.mark.parametrize("part", ["select", "recompute"])
def test_a_class_in_place_of_a_part_is_refused(part: str) -> None:
    kind = type(getattr(METHODS["reuse"], part))
    with pytest.raises(InvalidOption, match=rf"{part}=<class .* mean {kind.__name__}\(\)"):
        replace(METHODS["reuse"], **{part: kind})
    with pytest.raises(InvalidOption, match=f"{part}=None of method 'reuse'"):
        replace(METHODS["reuse"], **{part: None})


def test_a_choice_without_layers_is_an_error() -> None:
    class Flat(SamkvRecompute):
        def choose_layers(self, *given: Any) -> torch.Tensor:
            return super().choose_layers(*given)[0]

    class Short(RecomputeNone):
        def choose(self, layout: Layout) -> Mask:
            return super().choose(layout)[1:]

    class FlatSelect(SamkvSelect):
        def choose(self, *given: Any) -> torch.Tensor:
            return super().choose(*given)[0]

    for part, flat in (("recompute", Flat()), ("recompute", Short()), ("select", FlatSelect())):
        method = replace(METHODS["reuse"], name="flat", **{part: flat})
        with pytest.raises(InvalidOption, match=rf"'flat': its {part} .*shape .*; it must be \("):
            first_logits(shared_engine("llama", 16), PROMPT, CHUNKS, method)


def test_a_selection_that_chooses_nothing_is_an_error() -> None:
    class Bare(Select):
        pass

    with pytest.raises(TypeError, match="abstract method '?choose"):
        Bare()


def test_a_choice_by_layer_cannot_be_made_by_token_ids() -> None:
    with pytest.raises(InvalidOption, match="SamkvRecompute chooses .* such as 'auto'"):
        SamkvRecompute().choose(layout_of((20,)))


share = st.floats(0, 1)
letters = st.text("abcdefgh \n.é", min_size=1, max_size=60)
cuts = st.sampled_from(["whole", "at both ends", "in two"])

selections = st.one_of(
    st.just(SelectAll()),
    st.builds(MultiInfllmSelect, max_kept_ratio=share),
    st.builds(
        SamkvSelect, max_kept_ratio=st.none() | share, bias=st.booleans(), middle=st.booleans()
    ),
)
recomputations = st.one_of(
    st.just(RecomputeNone()),
    st.just(RecomputeAll()),
    st.builds(CacheblendRecompute, ratio=share, layer=st.integers(0, 5)),
    st.builds(A3Recompute, ratio=share, layer=st.integers(0, 5)),
    st.builds(EpicRecompute, first=st.integers(0, 40)),
    st.just(SamkvRecompute()),
    st.builds(
        GuidedRecompute,
        first=st.integers(0, 5),
        matched=st.integers(0, 140),
    ),
)
methods = st.builds(
    Method,
    name=st.just("any"),
    paper=st.just("-"),
    summary=st.just("-"),
    select=selections,
    recompute=recomputations,
    update=st.one_of(st.none(), st.just(fuse), st.builds(partial, st.just(mixed), share)),
    positions=st.sampled_from(("global", "local")),
    attend=st.none()
    | st.builds(ApeAttention, temperature=st.floats(0.05, 20), scale=st.floats(0, 3)),
)


def most_kept(method: Method, layout: TensorLayout) -> float:
    """Tokens that the method may keep at a layer at most."""
    select, n_context = method.select, layout.n_context
    lengths, anchors = [0] * layout.n_chunks, [0] * layout.n_chunks
    for n, chunk, is_anchor in zip(
        layout.block_lengths.tolist(), layout.block_chunk.tolist(), layout.is_anchor.tolist(),
        strict=True,
    ):  # fmt: skip
        lengths[chunk] += n
        anchors[chunk] += n if is_anchor else 0
    if isinstance(select, MultiInfllmSelect):
        return sum(
            max(select.max_kept_ratio * n, of) for n, of in zip(lengths, anchors, strict=True)
        )
    if isinstance(select, SamkvSelect):
        cap = 1.0 if select.max_kept_ratio is None else select.max_kept_ratio
        return max(cap * n_context if select.middle else 0, sum(anchors))
    return n_context


def cut(text: str, how: str) -> list[str]:
    """The pieces of a text that a prompt holds."""
    middle = len(text) // 2
    return {
        "whole": [text],
        "at both ends": [text[3:-2]],
        "in two": [text[:middle], text[middle + 1 :]],
    }[how]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(letters, cuts), max_size=3),
    st.tuples(st.text("abcdefgh .", min_size=40, max_size=60), cuts),
    st.sampled_from(["", "Read: "]),
    st.sampled_from(["", "?", "\n\nWhy was it so?"]),
    methods,
    st.sampled_from(["none", *sorted(EVICTIONS)]),
    st.sampled_from((4, 8, 16)),
)
def test_any_method_answers_and_keeps_to_its_budget(
    some: list[tuple[str, str]],
    long: tuple[str, str],
    before: str,
    question: str,
    method: Method,
    eviction: str,
    store_bits: int,
) -> None:
    held = {text.strip(): cut(text.strip(), how) for text, how in (*some, long)}
    assume(all(held) and max(map(len, held[long[0].strip()])) >= MIN_RUN)
    engine = Engine(tiny_model("llama"), block_size=4, store_bits=store_bits, prefix_bytes=0)
    engine.cache_chunks(list(held))
    prompt = before + "\n".join("\n > ".join(of) for of in held.values()) + question
    logits, query = first_logits(engine, prompt, None, method)
    assert bool(logits.isfinite().all())
    layout, report = query.layout, query.report
    assert layout.n_chunks >= 1 and report.chunk_misses == {}
    kept = query.kept[:, layout.block_of_token].sum(1)
    limit = most_kept(method, layout)
    assert float(kept.max()) <= limit + 1e-6
    # a last token of a chunk is computed, and stays
    n_last = int(layout.uncached[layout.context_positions].sum())
    assert 0 <= report.kept_ratio <= min(1.0, (limit + n_last) / layout.n_context + 1e-9)
    assert 0 <= report.recompute_ratio <= 1
    again, _ = first_logits(engine, prompt, None, method)
    # the second goes on from a beginning in memory: other sums in float32
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    answer = engine.generate(prompt, method=method, eviction=eviction, max_new_tokens=3)
    assert 0 <= answer.report.kept_ratio <= report.kept_ratio
    assert answer.report.recompute_ratio == report.recompute_ratio
