"""Eviction: what every rule keeps, worked out by hand, and what answers see of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samkv_integrations import EVICTIONS, METHODS, ChunkStore, Engine, Eviction, Method
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import get_eviction
from samkv_integrations.runtimes.transformers.eviction import (
    H2O,
    InfLLM,
    PyramidKV,
    Quest,
    RetrievalAttention,
    SageKV,
    SnapKV,
    StreamingLLM,
)
from samkv_integrations.runtimes.transformers.eviction.base import (
    DroppingEviction,
    Keeper,
    Once,
    Seen,
)
from samkv_integrations.runtimes.transformers.model.attention import attention
from samkv_integrations.runtimes.transformers.passes.decode import Decoder
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    ContextSlots,
    DenseCache,
    LayerEntries,
)
from tests.support.asking import Asked, ask, next_logits
from tests.support.covering import covering
from tests.support.laws import CHUNKS, PROMPT, TOLERANCE
from tests.support.models import FAMILIES, tiny_model

ANSWER = 24
DROPPING = [rule for rule in EVICTIONS.values() if isinstance(rule, DroppingEviction)]
CLASSES = {rule.name: type(rule) for rule in DROPPING}
SLIDING = [rule.name for rule in DROPPING if rule.slides]
FREE = CostModel(layer_s=0, token_s=0, pair_s=0, entry_s=0, read_s=0)
"""With these `auto` has no reason for full prefill: what it evicts from is what it read."""
SMALL = {"snapkv": {"window": 8}, "pyramidkv": {"window": 8}}
"""Options with which a rule can keep to the few entries that tests have."""


def rule_of(name: str, budget_tokens: int, **options: Any) -> DroppingEviction:
    return CLASSES[name](budget_tokens=budget_tokens, **SMALL.get(name, {}), **options)


@pytest.fixture(scope="module")
def engines() -> Callable[[str], Engine]:
    made: dict[str, Engine] = {}

    def engine_of(family: str) -> Engine:
        if family not in made:
            made[family] = Engine(tiny_model(family), block_size=8, prefix_bytes=0)
            made[family].costs = FREE
            made[family].cache_chunks(CHUNKS)
        return made[family]

    return engine_of


def asked(
    engine: Engine, method: str | Method, rule: Eviction | None, capacity: int = ANSWER
) -> Asked:
    """The first token of an answer, whose cache the rule has thinned out."""
    given = "none" if rule is None else rule
    return ask(engine, PROMPT, CHUNKS, method, eviction=given, capacity=capacity)


def decoder_of(engine: Engine, first: Asked) -> Decoder:
    return Decoder(engine.model, first.cache, first.layout.n_tokens)


@dataclass
class Case:
    """Random entries of one layer: the prompt's, of which some were computed, and the answer's."""

    query: Tensor  # (H, T, D)
    keys: Tensor  # (T, G, D)
    computed: list[int]
    n_entries: int  # of the prompt; the other T - n_entries are the answer's

    @classmethod
    def of(
        cls, seed: int, n_entries: int, n_steps: int, heads: tuple[int, int], share: float
    ) -> Case:
        random = torch.Generator().manual_seed(seed)
        n_heads, n_kv_heads = heads
        total = n_entries + n_steps
        query = torch.randn(n_heads, total, 8, generator=random)
        keys = torch.randn(total, n_kv_heads, 8, generator=random)
        chosen = (torch.rand(n_entries, generator=random) < share).nonzero()[:, 0].tolist()
        return cls(query, keys, sorted({*chosen, n_entries - 1}), n_entries)

    def attention(self, head: int, entry: int, entries: list[int]) -> dict[int, float]:
        """Weights that query ``head`` of ``entry`` gives to ``entries``."""
        group = self.query.shape[0] // self.keys.shape[1]
        keys = self.keys[entries, head // group].double()
        logits = keys @ self.query[head, entry].double() * 8**-0.5
        return dict(zip(entries, logits.softmax(0).tolist(), strict=True))

    def evicted(self, rule: DroppingEviction, budget: int) -> list[list[set[int]]]:
        """What each key-value head holds after the prompt and after every step, by the code."""
        n_steps, n_kv_heads = len(self.keys) - self.n_entries, self.keys.shape[1]
        names = torch.arange(len(self.keys)).float()[:, None, None].expand(-1, n_kv_heads, 8)
        is_context = torch.arange(self.n_entries) % 3 < 2
        cache = DenseCache(
            1,
            n_steps,
            n_tokens=self.n_entries,
            rule=replace(rule, budget_tokens=budget),
            method_attention=METHODS["ape"].attend,
        )
        at = torch.tensor(self.computed)
        taken = LayerEntries(
            keys=self.keys[: self.n_entries].clone(),
            values=names[: self.n_entries].clone(),  # an entry's value says which one it is
            n_entries=self.n_entries, is_context=is_context, context=ContextSlots(
                tokens=torch.arange(is_context.sum()), slots=is_context.nonzero()[:, 0],
                changed=torch.arange(0), other_slots=(~is_context).nonzero()[:, 0],
            ),
            queries=self.query[:, at],
            query_slots=at, scaling=8**-0.5,
        )  # fmt: skip
        cache.take(0, taken)
        history = [held(cache, self.n_entries)]
        for entry in range(self.n_entries, len(self.keys)):
            query = self.query[None, :, entry : entry + 1]
            key, value = (side[entry][None, :, None] for side in (self.keys, names))
            cache.attend(0, query, key, value, 8**-0.5)
            history.append(held(cache, self.n_entries))
        return history


def held(cache: DenseCache, n_prompt: int) -> list[set[int]]:
    """Names of the entries of each key-value head; all that is kept of one must stay together."""
    entries = cache.values[0][: cache.lengths[0], :, 0].T.int().tolist()
    assert all(len(set(names)) == len(names) for names in entries), "an entry is held twice"
    flags = [[name < n_prompt and name % 3 < 2 for name in names] for names in entries]
    assert cache.is_context(0).tolist() == flags, "an entry has another one's flag"
    return [set(names) for names in entries]


def union_of_best(scores: list[dict[int, float]], count: int) -> set[int]:
    """The best of every head while that fits, then the next ones, of the largest sum first."""
    ranked = [sorted(given, key=lambda entry: (-given[entry], entry)) for given in scores]
    kept: set[int] = set()
    for rank in range(len(ranked[0])):
        new = {entries[rank] for entries in ranked} - kept
        by_sum = sorted(new, key=lambda entry: (-sum(given[entry] for given in scores), entry))
        kept |= set(by_sum[: count - len(kept)])
    assert len(kept) == min(count, len(ranked[0]))
    return kept


def by_hand(*wanted: int) -> Case:
    """Twelve entries and one step of one head; all queries look at the ``wanted`` entries alone."""
    keys, query = torch.zeros(13, 1, 8), torch.zeros(1, 13, 8)
    keys[list(wanted), 0, 0] = query[..., 0] = 8.0
    return Case(query, keys, list(range(12)), 12)


@pytest.mark.parametrize(
    ("rule", "wanted", "after_prompt", "after_step"),
    [
        (StreamingLLM(budget_tokens=6, sinks=2), (4,), {0, 1, 8, 9, 10, 11}, {0, 1, *range(9, 13)}),
        # the first queries have nothing but entry 0 to look at; 9 is the least of the older ones
        (H2O(budget_tokens=6), (2, 5), {0, 2, 5, 9, 10, 11}, {0, 2, 5, 10, 11, 12}),
        (SnapKV(budget_tokens=6, window=2, kernel=1), (2, 5, 7, 8), {2, 5, 7, 8, 10, 11}, None),
        # pooled over three entries, neighbours are wanted as much
        (SnapKV(budget_tokens=8, window=2, kernel=3), (2, 7), {1, 2, 3, 6, 7, 8, 10, 11}, None),
        (PyramidKV(budget_tokens=6, window=2, kernel=1), (2, 5, 7, 8), {2, 5, 7, 8, 10, 11}, None),
        (SageKV(budget_tokens=8), (3, 5, 6, 8), {0, 1, 3, 5, 6, 8, 10, 11},
         {0, 1, 3, 5, 6, 8, 11, 12}),
    ],
)  # fmt: skip
def test_what_a_rule_keeps(
    rule: DroppingEviction, wanted: tuple[int, ...], after_prompt: set[int],
    after_step: set[int] | None,
) -> None:  # fmt: skip
    """A rule that does not slide adds the answer's entries to those of the prompt."""
    assert rule.budget_tokens is not None
    found = by_hand(*wanted).evicted(rule, rule.budget_tokens)
    assert found == [[after_prompt], [after_step or after_prompt | {12}]]


def test_a_share_is_one_of_the_logical_prompt_and_never_too_small() -> None:
    assert H2O(budget_ratio=0.25).budget(1000) == 250
    assert SnapKV(budget_ratio=0.2, window=32).budget(100) == 33
    assert StreamingLLM(budget_ratio=1.0).budget(77) == 77


def test_the_pyramid_falls_in_equal_steps_around_its_budget() -> None:
    rule = PyramidKV(budget_tokens=132, window=32)  # 100 a layer on average
    budgets = [rule.layer_budget(4000, layer, 20) - 32 for layer in range(20)]
    assert (budgets[0], budgets[-1]) == (195, 5)  # 2 * 100 - 5, 100 // 20
    steps = [a - b for a, b in pairwise(budgets)]
    assert set(steps) == {10}
    assert sum(budgets) == 2000
    # the lowest layer cannot keep more than there is: 210 - 32
    budgets = [rule.layer_budget(210, layer, 20) - 32 for layer in range(20)]
    assert (budgets[0], budgets[-1]) == (178, 22)
    assert {rule.layer_budget(190, layer, 20) for layer in range(20)} == {132}
    assert rule.layer_budget(4000, 0, 1) == 132


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_for_all_entries_changes_nothing(
    engines: Callable[[str], Engine], family: str
) -> None:
    engine = engines(family)
    for method in ("recompute", "samkv-guided"):
        plain = decoder_of(engine, asked(engine, method, None))
        n_tokens, lengths = plain.n_tokens, list(plain.cache.lengths)
        tokens = (70, 9, 201, 33)
        with torch.inference_mode():
            expected = [next_logits(plain, token) for token in tokens]
        for name in CLASSES:
            # the smallest that is enough: a rule that slides counts the answer's entries as well
            budget = n_tokens + (ANSWER if name in SLIDING else 0)
            evicting = decoder_of(engine, asked(engine, method, rule_of(name, budget)))
            assert evicting.cache.lengths == lengths
            with torch.inference_mode():
                for token, logits in zip(tokens, expected, strict=True):
                    assert torch.equal(next_logits(evicting, token), logits)


@pytest.mark.parametrize(("family", "method"), covering(FAMILIES, list(METHODS)))
def test_every_method_with_every_rule(
    engines: Callable[[str], Engine], family: str, method: str
) -> None:
    engine, tokens = engines(family), range(60, 68)
    whole = asked(engine, method, None)
    lengths, kv_bytes = list(whole.cache.lengths), whole.cache.kv_bytes
    other = decoder_of(engine, whole)
    with torch.inference_mode():
        unlike = [next_logits(other, token) for token in tokens][-1]
    for name in CLASSES:
        rule = rule_of(name, 40)
        first = asked(engine, method, rule)
        n_layers, n_tokens = engine.model.n_layers, first.layout.n_tokens
        budgets = [rule.layer_budget(n_tokens, layer, n_layers) for layer in range(n_layers)]
        entries = [min(b, n) for b, n in zip(budgets, lengths, strict=True)]
        assert first.cache.lengths == entries
        report = first.report
        assert (report.method, report.eviction) == (method, name)
        assert report.kv_bytes == kv_bytes
        assert report.decode_kv_bytes == first.cache.kv_bytes < report.kv_bytes
        decoder = decoder_of(engine, first)
        with torch.inference_mode():
            for token in tokens:
                logits = next_logits(decoder, token)
                assert bool(logits.isfinite().all())
        assert float((logits - unlike).abs().max()) > 0.01, "nothing of value was evicted"
        added = 0 if name in SLIDING else 8
        assert first.cache.lengths == [n + added for n in entries]
        assert decoder.n_tokens == n_tokens + 8


@pytest.mark.parametrize("name", CLASSES)
def test_the_first_token_has_read_everything(engines: Callable[[str], Engine], name: str) -> None:
    engine = engines("llama")
    for method in METHODS:
        options = {"method": method, "max_new_tokens": 1}
        whole = engine.generate(PROMPT, CHUNKS, eviction="none", **options)
        answer = engine.generate(PROMPT, CHUNKS, eviction=rule_of(name, 12), **options)
        assert answer.text == whole.text


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Seen, Tensor]]:
    """What an evictor is shown of each layer, with the layer's values; nothing is evicted."""
    shown: list[tuple[Seen, Tensor]] = []

    def seeing(**shown_now: Any) -> Seen:
        seen.append(Seen(**shown_now))
        return seen[-1]

    def look(cache: DenseCache, layer: int, slots: Tensor | None) -> None:
        shown.append((seen[-1], cache.values[layer][: cache.lengths[layer]]))

    seen: list[Seen] = []
    monkeypatch.setattr(
        "samkv_integrations.runtimes.transformers.passes.working_cache.Seen", seeing
    )
    monkeypatch.setattr(DenseCache, "keep", look)
    return shown


@pytest.mark.parametrize(
    ("family", "method"),
    covering(FAMILIES, ["recompute", "reuse", "reuse-local", "samkv-guided"], times=2),
)
def test_a_rule_sees_the_attention_of_the_model(
    engines: Callable[[str], Engine],
    looks: list[tuple[Seen, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    method: str,
) -> None:
    """The weights that it is shown, times the values, are what the layer computed."""
    outputs = []

    def recorded(layer: int, *arguments: Any, **options: Any) -> Tensor:
        outputs.append(attention(*arguments, **options))
        return outputs[-1]

    engine = engines(family)
    monkeypatch.setattr(engine.model, "attention", recorded)
    asked(engine, method, EVICTIONS["h2o"])
    assert len(looks) == engine.model.n_layers
    for (seen, values), output in zip(looks, outputs[-len(looks) :], strict=True):
        (weights,) = seen.weights()  # (G, H/G, R, S)
        expected = (weights @ values.transpose(0, 1)[:, None]).flatten(0, 1)
        torch.testing.assert_close(output[0], expected, **TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class AllBut(DroppingEviction):
    """Gives up one entry of every layer and head."""

    slot: int

    name: ClassVar[str] = "all-but"
    paper: ClassVar[str] = "-"
    summary: ClassVar[str] = "all but one entry"
    slides: ClassVar[bool] = False

    @property
    def min_tokens(self) -> int:
        return 1

    def keeper(self, budget: int) -> Keeper:
        def choose(seen: Seen) -> Tensor:
            slots = torch.arange(seen.n_entries)
            return slots[slots != self.slot][:, None].expand(-1, seen.keys.shape[1])

        return Once(budget, choose)


def masked_logits(engine: Engine, ids: list[int], visible: Tensor) -> Tensor:
    """(T, vocabulary) of transformers' own forward, entries attending where (T, T) ``visible``."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)[None, None]
    with torch.inference_mode():
        logits: Tensor = engine.model.hf(torch.tensor([ids]), attention_mask=mask).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evicted_entry_is_a_masked_one(engines: Callable[[str], Engine], family: str) -> None:
    """And all others are where they were: the next token's position is the logical one."""
    engine = engines(family)
    tokens = [70, 9, 201, 33, 8]
    for slot in (0, 57):
        first = asked(engine, "recompute", None)
        n = first.layout.n_tokens
        first = asked(engine, "recompute", AllBut(budget_tokens=n - 1, slot=slot))
        visible = torch.ones(n + len(tokens), n + len(tokens), dtype=torch.bool).tril()
        visible[n:, slot] = False
        expected = masked_logits(engine, [*first.layout.token_ids.tolist(), *tokens], visible)
        decoder = decoder_of(engine, first)
        with torch.inference_mode():
            for entry, token in enumerate(tokens, start=n):
                torch.testing.assert_close(
                    next_logits(decoder, token), expected[entry], **TOLERANCE
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sliding_window_is_a_banded_mask(engines: Callable[[str], Engine], family: str) -> None:
    """More steps than the window has entries, so that each of its slots is used again."""
    engine = engines(family)
    sinks, budget, steps = 4, 16, 30
    rule = StreamingLLM(budget_tokens=budget, sinks=sinks)
    first = asked(engine, "recompute", rule, steps)
    n, tokens = first.layout.n_tokens, [(7 * i) % 200 + 6 for i in range(steps)]
    distance = torch.arange(n + steps)[:, None] - torch.arange(n + steps)
    visible = distance >= 0
    band = (distance <= budget - sinks) | (torch.arange(n + steps) < sinks)
    visible[n:] &= band[n:]
    expected = masked_logits(engine, [*first.layout.token_ids.tolist(), *tokens], visible)
    decoder = decoder_of(engine, first)
    with torch.inference_mode():
        for entry, token in enumerate(tokens, start=n):
            torch.testing.assert_close(next_logits(decoder, token), expected[entry], **TOLERANCE)


@pytest.mark.parametrize("name", CLASSES)
def test_memory_is_freed_and_stays_so(engines: Callable[[str], Engine], name: str) -> None:
    engine = engines("llama")
    steps, budget, row_bytes = 100, 40, 2 * 16 * 4
    first = asked(engine, "recompute", rule_of(name, budget), steps)
    decoder = decoder_of(engine, first)
    most = 4 * (128 if name in SLIDING else 256)  # room comes by 128 entries

    def allocated() -> int:
        sides = (*first.cache.keys, *first.cache.values)
        return sum(entries.untyped_storage().nbytes() for entries in sides)

    assert allocated() <= most * 2 * row_bytes < 4 * first.layout.n_tokens * 2 * row_bytes
    before = allocated()
    with torch.inference_mode():
        for token in range(steps):
            next_logits(decoder, token + 6)
    assert allocated() <= (before if name in SLIDING else most * 2 * row_bytes)
    assert first.cache.kv_bytes <= most * 2 * row_bytes
    if name in SLIDING:
        assert first.cache.lengths == [budget] * 4


def test_the_report_follows_the_answer(engines: Callable[[str], Engine]) -> None:
    engine = engines("llama")
    stream = engine.stream(PROMPT, CHUNKS, method="reuse", eviction="none", max_new_tokens=9)
    entry = 4 * 2 * 2 * 16 * 4
    n_tokens = stream.report.prompt_tokens
    assert stream.report.decode_kv_bytes == stream.report.kv_bytes == n_tokens * entry
    list(stream)
    # the last token is never read
    assert stream.report.completion_tokens == 9
    assert stream.report.decode_kv_bytes == (n_tokens + 8) * entry
    stream = engine.stream(PROMPT, CHUNKS, method="reuse", eviction="h2o", max_new_tokens=9)
    list(stream)
    assert stream.report.kv_bytes == n_tokens * entry
    assert stream.report.decode_kv_bytes == int(0.2 * n_tokens) * entry


def test_the_engine_s_rule_and_that_of_a_call() -> None:
    engine = Engine(tiny_model("llama"), eviction="h2o")
    assert engine.generate("Why?" * 20, max_new_tokens=2).report.eviction == "h2o"
    mine = SageKV(budget_tokens=9)
    for eviction, name in (("none", None), ("sage-kv", "sage-kv"), (mine, "sage-kv")):
        answer = engine.generate("Why?" * 20, eviction=eviction, max_new_tokens=2)
        assert answer.report.eviction == name


def test_none_attends_to_more_than_the_method_s_own_rule() -> None:
    own = replace(METHODS["samkv-guided"], eviction=Quest(budget_ratio=0.1))
    engine = Engine(tiny_model("llama"), method=own, block_size=8, prefix_bytes=0)
    engine.cache_chunks(CHUNKS)
    first, *steps = engine.logits(PROMPT, CHUNKS, follow=(40, 50))
    whole, *others = engine.logits(PROMPT, CHUNKS, follow=(40, 50), eviction="none")
    assert torch.equal(first, whole), "the first token has read everything"
    assert all(float((a - b).abs().max()) > 0.01 for a, b in zip(steps, others, strict=True))


def test_a_broken_cache_begins_the_eviction_anew(tmp_path: Path) -> None:
    """The pass that found it has evicted from the layers before: none of that may stay."""
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path), block_size=8)
    keys = engine.cache_chunks(CHUNKS)
    file = next(tmp_path.rglob(f"{keys[0]}.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 255  # the last layer's entries, which are read last
    file.write_bytes(content)
    options = {"method": "reuse", "max_new_tokens": 12, "eviction": "h2o", "on_miss": "text"}
    answer = engine.generate(PROMPT, CHUNKS, **options)
    assert answer.report.chunk_misses == {"corrupt": 1}
    other = Engine(engine.model, block_size=8)
    other.cache_chunks(CHUNKS[1:])
    expected = other.generate(PROMPT, CHUNKS, **options)
    assert answer.text == expected.text
    assert answer.report.decode_kv_bytes == expected.report.decode_kv_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(), "budget_tokens=None and budget_ratio=None of 'h2o'; give exactly one"),
        (lambda: H2O(budget_tokens=9, budget_ratio=0.5), "give exactly one"),
        (lambda: replace(EVICTIONS["h2o"], budget_tokens=9), "set the other one to None"),
        (lambda: H2O(budget_ratio=0.0), "budget_ratio=0.0 of 'h2o'; it must be above 0"),
        (lambda: H2O(budget_ratio=1.5), "at most 1"),
        (lambda: H2O(budget_tokens=1), "budget_tokens=1 of 'h2o'.* whole number from 2 on"),
        (lambda: H2O(budget_tokens=9.5), "budget_tokens=9.5"),
        (lambda: StreamingLLM(budget_tokens=4), "a whole number from 5 on"),
        (lambda: StreamingLLM(budget_tokens=9, sinks=-1), "sinks=-1 of 'streaming-llm'"),
        (lambda: SnapKV(budget_tokens=32), "a whole number from 33 on"),
        (lambda: SnapKV(budget_ratio=0.2, window=0), "window=0 of 'snapkv'.* from 1 on"),
        (lambda: SnapKV(budget_ratio=0.2, kernel=0), "kernel=0 of 'snapkv'"),
        (lambda: SnapKV(budget_ratio=0.2, kernel=4), "must be odd.* give 3 or 5"),
        (lambda: PyramidKV(budget_ratio=0.2, beta=0), "beta=0 of 'pyramidkv'"),
        (lambda: PyramidKV(budget_tokens=32), "of 'pyramidkv'.* from 33 on"),
        (lambda: SageKV(budget_tokens=3), "a whole number from 4 on"),
        (lambda: InfLLM(budget_tokens=142), "budget_tokens=142 of 'infllm'.* from 143 on"),
        (lambda: InfLLM(budget_ratio=0.5, first=-1), "first=-1 of 'infllm'"),
        (lambda: InfLLM(budget_ratio=0.5, block=0), "block=0 of 'infllm'"),
        (lambda: RetrievalAttention(budget_tokens=80), "'retrieval-attention'.* from 81 on"),
    ],
)
def test_wrong_options_are_named(make: Callable[[], Eviction], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make()


def test_a_rule_that_neither_drops_nor_chooses() -> None:
    class Mine(Eviction):
        name, paper, summary = "mine", "-", "nothing"
        min_tokens = 1  # type: ignore[assignment]

    with pytest.raises(InvalidOption, match=r"'mine' is a Mine; .*subclass DroppingEviction or"):
        get_eviction(Mine(budget_ratio=0.1))


def test_slots_of_another_shape_are_an_error(engines: Callable[[str], Engine]) -> None:
    class Mine(H2O):
        def keeper(self, budget: int) -> Keeper:
            return Once(budget, lambda _: torch.arange(budget))

    with pytest.raises(InvalidOption, match=r"slots of shape \(9,\); it must be \(9, 2\)"):
        asked(engines("llama"), "reuse", Mine(budget_tokens=9))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rule_keeps_to_its_budget(data: st.DataObject) -> None:
    draw = data.draw
    name = draw(st.sampled_from(sorted(CLASSES)))
    options: dict[str, Any] = {}
    if name == "streaming-llm":
        options["sinks"] = draw(st.integers(0, 6))
    if name in ("snapkv", "pyramidkv"):
        options["window"] = draw(st.integers(1, 8))
        options["kernel"] = draw(st.sampled_from([1, 3, 7, 15]))
    smallest = CLASSES[name](budget_ratio=0.5, **options).min_tokens
    rule = CLASSES[name](budget_tokens=draw(st.integers(smallest, 40)), **options)
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    n_entries, n_steps = draw(st.integers(1, 50)), draw(st.integers(0, 12))
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    case = Case.of(draw(st.integers(0, 99)), n_entries, n_steps, heads, share)
    budget = rule.budget_tokens
    assert budget is not None
    for step, kept in enumerate(case.evicted(rule, budget)):
        count = n_entries + step if name in SLIDING else n_entries
        added = 0 if name in SLIDING else step
        assert {len(entries) for entries in kept} == {min(budget, count) + added}
        assert all(n_entries + step - 1 in entries for entries in kept), (
            "the newest entry is always kept"
        )
