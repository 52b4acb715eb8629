"""The limit laws: what every method must equal at the ends of its range, on every family.

Logits are compared in float32; 2e-4 is far below what a single wrong row or position changes in
these models (their logits spread over tens) and above the rounding of another summation order.

Laws that compare stored entries with computed ones hold to that with 16 bits, which keep every bit.
With fewer they hold as far as uniform noise of half a step, added to every key and value, moves the
same logits (`noisy`): nothing within a step is known to a cache of few bits. Laws that compare two
ways over the same stored entries know no bits, and hold to 2e-4 with all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from samkv_integrations.bench.variants import CompetingSelect
from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.engine import blend
from samkv_integrations.engine.engine import Engine
from samkv_integrations.eviction import Quest
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.a3 import A3Recompute
from samkv_integrations.methods.ape import ApeAttention
from samkv_integrations.methods.base import (
    Checked,
    Method,
    ProbedLayer,
    Recompute,
    Select,
    Selection,
    SelectionInputs,
    Update,
    overwrite,
)
from samkv_integrations.methods.cacheblend import CacheblendRecompute
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.multi_infllm import MultiInfllmSelect
from samkv_integrations.methods.parts import Fusion, RecomputeAll, RecomputeNone
from samkv_integrations.methods.samkv import SamkvSelect
from samkv_integrations.model.attention import attention
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout
from tests.support.asking import Asked, ask
from tests.support.chunks import decoded, key_steps, transformed
from tests.support.models import FAMILIES, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def words(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghij klmnop\nqrs") for _ in range(n)).strip() or "x"


CHUNKS = [words(seed, n) for seed, n in enumerate((90, 41, 7, 66, 24))]
FROM_THE_START = "\n\n".join(CHUNKS) + "\n\nQuestion: why?"
PROMPT = "Read:\n\n" + "\n\n-- more\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"


def first_logits(
    engine: Engine, prompt: str, chunks: list[str], method: Method | str
) -> tuple[Tensor, Asked]:
    asked = ask(engine, prompt, chunks, method)
    return asked.first.logits, asked


def plain_logits(model: Model, layout: Layout) -> Tensor:
    """The plain forward of transformers over the same token ids."""
    with torch.inference_mode():
        logits: Tensor = model.hf(layout.token_ids[None]).logits[0, -1]
        return logits


def assert_same_answer(query: Asked, logits: Tensor, expected: Tensor, other: Asked) -> None:
    """The same first token, and the same rows for those after it."""
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert query.cache.lengths == other.cache.lengths
    for layer, n_rows in enumerate(query.cache.lengths):
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[layer][:n_rows] for q in (query, other))
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


def engine_of(family: str, store_bits: int) -> Engine:
    engine = Engine(tiny_model(family), block_size=8, store_bits=store_bits)
    engine.cache_chunks(CHUNKS)
    return engine


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, with the entries that the model computed."""
    return engine_of(request.param, 16)


WITH_BITS = [*((family, 16) for family in FAMILIES), ("llama", 4), ("qwen3", 4), ("qwen2", 8)]


@pytest.fixture(params=WITH_BITS, ids=lambda p: f"{p[0]}-{p[1]}")
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Of every family, and with entries of few bits."""
    return engine_of(*request.param)


def test_recompute_is_the_plain_forward(engine: Engine) -> None:
    logits, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    assert query.layout.n_chunks == len(CHUNKS)
    torch.testing.assert_close(logits, plain_logits(engine.model, query.layout), **TOLERANCE)
    assert float(logits.std()) > 1, "logits too flat to notice a mistake"


def test_recompute_continues_with_the_tokens_of_generate(engine: Engine) -> None:
    answer = engine.generate(PROMPT, CHUNKS, method="recompute", max_new_tokens=12)
    _, query = first_logits(engine, PROMPT, CHUNKS, "recompute")
    ids = query.layout.token_ids[None]
    with torch.inference_mode():
        out = engine.model.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    assert answer.text == engine.model.detokenize(out[0, ids.shape[1] :].tolist())


def test_one_chunk_reused_after_its_prefix_is_prefix_caching(engine: Engine) -> None:
    prompt = CHUNKS[0] + "\n\nQuestion: why?"
    reused, query = first_logits(engine, prompt, CHUNKS[:1], "reuse")
    assert bool(query.layout.exact.all())
    torch.testing.assert_close(reused, plain_logits(engine.model, query.layout), **TOLERANCE)


def test_a_chunk_after_the_prefix_text_of_its_cache_is_exact(engine: Engine) -> None:
    system = "You answer briefly.\n\n"
    longer = Engine(engine.model, block_size=8, prefix_text=system, store_bits=16)
    assert longer.fingerprint.digest != engine.fingerprint.digest
    longer.cache_chunks(CHUNKS[:1])
    prompt = f"{system}{CHUNKS[0]}\n\nQuestion: why?"
    reused, query = first_logits(longer, prompt, CHUNKS[:1], "reuse")
    assert query.layout.exact.tolist() == [True]
    torch.testing.assert_close(reused, plain_logits(engine.model, query.layout), **TOLERANCE)
    _, other = first_logits(longer, CHUNKS[0] + " why?", CHUNKS[:1], "reuse")
    assert other.layout.exact.tolist() == [False]


def test_reuse_of_many_chunks_is_not_full_prefill(engine: Engine) -> None:
    """Otherwise the laws here could not fail."""
    reused, query = first_logits(engine, PROMPT, CHUNKS, "reuse")
    assert float((reused - plain_logits(engine.model, query.layout)).abs().max()) > 0.05
    local, _ = first_logits(engine, PROMPT, CHUNKS, "reuse-local")
    assert float((reused - local).abs().max()) > 0.05


@pytest.mark.parametrize("name", ["samkv-overwrite", "samkv-guided"])
def test_keeping_and_recomputing_all_is_recompute(engine: Engine, name: str) -> None:
    select = {
        "samkv-overwrite": KeepAll(),
        "samkv-guided": GuidedSelect(),
    }[name]
    method = replace(METHODS[name], select=select, recompute=RecomputeAll())
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    torch.testing.assert_close(logits, plain_logits(engine.model, query.layout), **TOLERANCE)


class KeepAll(SamkvSelect):
    """SamKV's probe and inputs, every block kept."""

    def choose(self, scores, inputs, layout) -> Selection:  # noqa: ANN001
        chosen = super().choose(scores, inputs, layout)
        return Selection(keep=torch.ones_like(chosen.keep))


SELECTS = [GuidedSelect(), GuidedSelect(window=1, sinks=0), CompetingSelect()]


@pytest.mark.parametrize("select", SELECTS, ids=str)
def test_guided_recomputing_nothing_is_reuse(any_engine: Engine, select: GuidedSelect) -> None:
    for recompute in (RecomputeNone(), GuidedRecompute(ratio=0.0)):
        method = replace(METHODS["samkv-guided"], select=select, recompute=recompute)
        guided, query = first_logits(any_engine, PROMPT, CHUNKS, method)
        assert query.report.kept_ratio == 1.0 and query.report.recompute_ratio == 0.0
        assert_same_answer(query, guided, *first_logits(any_engine, PROMPT, CHUNKS, "reuse"))


@pytest.mark.parametrize("select", SELECTS, ids=str)
def test_guided_recomputing_all_is_recompute(any_engine: Engine, select: GuidedSelect) -> None:
    """At any number of bits: no stored entry is left. What leads up must go all the way, too."""
    for recompute in (RecomputeAll(), GuidedRecompute(ratio=1.0, hits=None, lead_layers=1.0)):
        method = replace(METHODS["samkv-guided"], select=select, recompute=recompute)
        guided, query = first_logits(any_engine, PROMPT, CHUNKS, method)
        full = first_logits(any_engine, PROMPT, CHUNKS, "recompute")
        assert_same_answer(query, guided, *full)
        assert query.report.recompute_ratio == 1.0


# --- the methods of other papers ---------------------------------------------------------------


def changed(name: str, **options: float) -> Method:
    """A method with other options of its recomputation."""
    method = METHODS[name]
    return replace(method, recompute=replace(method.recompute, **options))


@pytest.mark.parametrize(
    "method",
    [
        changed("epic", first=90),
        changed("epic", first=0, last=90),
        changed("epic", first=45, last=45),
        changed("epic", ratio=1.0),
        changed("cacheblend", ratio=1.0),
        changed("cacheblend", ratio=0.0, layer=3),  # no layer comes after it
        changed("a3", ratio=1.0),
        changed("a3", ratio=0.3, layer=9),
    ],
    ids=lambda m: f"{m.name} {m.recompute}",
)
def test_recomputing_every_token_is_recompute(any_engine: Engine, method: Method) -> None:
    # the first chunk is reused as it is where it is exact, and so as exactly as it was stored
    is_lossless = any_engine.fingerprint.store_bits == 16
    for prompt in (PROMPT, FROM_THE_START) if is_lossless else (PROMPT,):
        logits, query = first_logits(any_engine, prompt, CHUNKS, method)
        assert_same_answer(query, logits, *first_logits(any_engine, prompt, CHUNKS, "recompute"))
        exact = len(CHUNKS[0]) if query.layout.exact[0] else 0
        n_context = query.layout.n_context
        assert query.report.recompute_ratio == (n_context - exact) / n_context


@pytest.mark.parametrize(
    "method",
    [
        changed("epic", first=0),
        changed("epic", ratio=0.0),
        changed("epic", ratio=0.0, first=9, last=9),  # the share comes instead of the counts
        replace(METHODS["multi-infllm"], select=MultiInfllmSelect(max_kept_ratio=1.0)),
    ],
    ids=lambda m: f"{m.name} {m.recompute} {m.select}",
)
def test_recomputing_nothing_of_everything_is_reuse(any_engine: Engine, method: Method) -> None:
    logits, query = first_logits(any_engine, PROMPT, CHUNKS, method)
    assert_same_answer(query, logits, *first_logits(any_engine, PROMPT, CHUNKS, "reuse"))
    assert query.report.recompute_ratio == 0.0


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("name", ["cacheblend", "a3"])
def test_a_share_of_nothing_recomputes_the_layers_of_the_check_alone(
    engine: Engine, name: str, layer: int
) -> None:
    logits, query = first_logits(engine, PROMPT, CHUNKS, changed(name, ratio=0.0, layer=layer))
    reused, of_reuse = first_logits(engine, PROMPT, CHUNKS, "reuse")
    full, of_full = first_logits(engine, PROMPT, CHUNKS, "recompute")
    context = query.layout.context_positions
    for n in range(engine.model.n_layers):
        expected = of_full if n <= layer else of_reuse
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[n][context] for q in (query, expected))
            torch.testing.assert_close(mine, theirs, **TOLERANCE)
    assert query.report.recompute_ratio == (layer + 1) / engine.model.n_layers
    # neither end: the question has read what lower layers computed again and upper ones kept. Only
    # the keys and values of layer 0 are of a token by itself, the same however often they are made
    for other in (full, reused) if layer else (full,):
        assert float((logits - other).abs().max()) > 0.01


def test_ape_without_temperature_and_scale_is_reuse_local(any_engine: Engine) -> None:
    method = replace(METHODS["ape"], attend=ApeAttention(temperature=1.0, scale=1.0))
    logits, query = first_logits(any_engine, PROMPT, CHUNKS, method)
    local, of_local = first_logits(any_engine, PROMPT, CHUNKS, "reuse-local")
    assert_same_answer(query, logits, local, of_local)
    tokens = (70, 9, 201, 33, 8, 61)
    expected = of_local.follow(tokens)
    torch.testing.assert_close(query.follow(tokens), expected, **TOLERANCE)
    # every step weighs as the method says, not as the model does
    sharp = ask(any_engine, PROMPT, CHUNKS, method)
    sharp.cache._weigh = ApeAttention(temperature=0.5)
    assert float((sharp.follow(tokens) - expected).abs().amax(1).min()) > 0.05
    texts = [
        any_engine.generate(PROMPT, CHUNKS, method=m, max_new_tokens=8).text
        for m in (method, "reuse-local")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "name", ["samkv-overwrite", "samkv-guided", "epic", "cacheblend", "a3", "recompute"]
)
def test_fusion_with_weight_one_is_overwrite(any_engine: Engine, name: str) -> None:
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.3, hits=None))
    overwritten, of_overwrite = first_logits(any_engine, PROMPT, CHUNKS, method)
    assert of_overwrite.report.recompute_ratio > 0.1
    fused, query = first_logits(
        any_engine, PROMPT, CHUNKS, replace(method, update=Fusion(weight=1.0))
    )
    assert_same_answer(query, fused, overwritten, of_overwrite)


def test_fusion_with_weight_zero_is_reuse(any_engine: Engine) -> None:
    method = replace(METHODS["recompute"], update=Fusion(weight=0.0))
    unchanged, _ = first_logits(any_engine, PROMPT, CHUNKS, method)
    reused, _ = first_logits(any_engine, PROMPT, CHUNKS, "reuse")
    torch.testing.assert_close(unchanged, reused, **TOLERANCE)


def test_order_of_ingest_does_not_matter(engine: Engine) -> None:
    """Nor whether chunks are prefilled together or one by one."""
    other = Engine(engine.model, block_size=8, store_bits=16)
    for chunk in reversed(CHUNKS):
        other.cache_chunk(chunk)
    for name in METHODS:
        one, of_one = first_logits(engine, PROMPT, CHUNKS, name)
        two, of_two = first_logits(other, PROMPT, CHUNKS, name)
        assert_same_answer(of_one, one, two, of_two)


@pytest.mark.parametrize("store_bits", [4, 8, 16])
def test_order_of_ingest_changes_no_bit(store_bits: int) -> None:
    """Chunk by chunk, so that no padding rounds a key across the border between two codes."""
    engines = [Engine(tiny_model("llama"), block_size=8, store_bits=store_bits) for _ in range(2)]
    for engine, chunks in zip(engines, (CHUNKS, CHUNKS[::-1]), strict=True):
        for chunk in chunks:
            engine.cache_chunk(chunk)
    one, two = ([stored(engine, chunk) for chunk in CHUNKS] for engine in engines)
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mine.entries, theirs.entries)
        assert torch.equal(mine.key_range, theirs.key_range)
    follow = [70, 9, 201]
    mine, theirs = (e.logits(PROMPT, CHUNKS, follow=follow) for e in engines)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "recompute"])
def test_no_method_changes_an_exact_first_chunk(engine: Engine, name: str) -> None:
    """Rows of the first chunk that are kept at all must be those of full prefill."""
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.3, hits=None))
    _, query = first_logits(engine, FROM_THE_START, CHUNKS, method)
    _, full = first_logits(engine, FROM_THE_START, CHUNKS, "recompute")
    layout = query.layout
    assert layout.exact.tolist() == [True] + [False] * (len(CHUNKS) - 1)
    kept = query.kept[:, layout.block_of_token] & (layout.chunk_of_token == 0)
    assert kept.any()
    for layer in range(engine.model.n_layers):
        first = layout.context_positions[kept[layer]]
        before = int(layout.uncached[: len(engine.prefix)].sum())
        rows = slice(before, before + len(first))
        for mine, exact in (
            (query.cache.keys, full.cache.keys),
            (query.cache.values, full.cache.values),
        ):
            torch.testing.assert_close(mine[layer][rows], exact[layer][first], **TOLERANCE)
    # and none of them is computed again
    of_first = layout.chunk_of_token == 0
    assert not bool(query.recomputed[:, of_first].any())


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_of_one_exact_chunk_reads_and_computes_no_more_than_reuse(
    engine: Engine, name: str
) -> None:
    """There is nothing to decide about: a check of nothing, a share of nothing."""
    prompt = CHUNKS[0] + "\n\nQuestion: why?"
    logits, query = first_logits(engine, prompt, CHUNKS[:1], name)
    assert bool(logits.isfinite().all())
    keeps_all = not METHODS[name].select.probes or name == "samkv-guided"
    if keeps_all and METHODS[name].attend is None:
        plain = plain_logits(engine.model, query.layout)
        torch.testing.assert_close(logits, plain, **TOLERANCE)
    if name != "recompute":
        assert query.report.recompute_ratio == 0.0


@pytest.mark.parametrize("update", [overwrite, Fusion()])
def test_guided_on_a_small_context_is_full_prefill(engine: Engine, update: Update) -> None:
    chunks = [CHUNKS[1], CHUNKS[4]]  # 65 tokens
    for prompt in ("Read:\n\n" + "\n\n".join(chunks) + "\n\nQuestion: why?", chunks[0] + "?"):
        asked = [chunk for chunk in chunks if chunk in prompt]
        for small, is_whole in ((65, True), (64, len(asked) == 1), (0, False)):
            method = METHODS["samkv-guided"]
            recompute = replace(method.recompute, small_context=small)
            method = replace(method, recompute=recompute, update=update)
            logits, query = first_logits(engine, prompt, asked, method)
            report = query.report
            if is_whole:
                plain = plain_logits(engine.model, query.layout)
                torch.testing.assert_close(logits, plain, **TOLERANCE)
                exact = query.layout.exact[query.layout.chunk_of_token].sum()
                computed = 1 - int(exact) / query.layout.n_context
                assert report.recompute_ratio == pytest.approx(computed)
            assert len(query.planned) == (1 if is_whole else 2), "a probe, or none"
            assert report.kept_ratio == 1


# --- nothing attends to what comes after it ----------------------------------------------------


class Tape:
    """What a method decided about one prompt, in order, to be decided again about another."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []
        self._at: int | None = None

    def rewind(self) -> None:
        self._at = 0

    def decide(self, decision: Callable[[], Any]) -> Any:  # noqa: ANN401
        if self._at is None:
            self.decisions.append(decision())
            return self.decisions[-1]
        self._at += 1
        return self.decisions[self._at - 1]

    @property
    def is_played(self) -> bool:
        return self._at == len(self.decisions)


class TapedSelect(Select):
    """A selection whose decisions are on a tape."""

    def __init__(self, part: Select, tape: Tape) -> None:
        self.part, self.tape = part, tape

    @property
    def needs(self) -> frozenset[str]:
        return self.part.needs

    @property
    def probes(self) -> bool:
        return self.part.probes

    def probe_blocks(self, layout: Layout) -> Tensor:
        return self.part.probe_blocks(layout)

    def probe_tokens(self, layout: Layout) -> Tensor:
        return self.part.probe_tokens(layout)

    def score(self, probed: ProbedLayer, layout: Layout) -> Tensor | None:
        return self.part.score(probed, layout)

    def choose(self, scores: Tensor | None, inputs: SelectionInputs, layout: Layout) -> Selection:
        return self.tape.decide(lambda: self.part.choose(scores, inputs, layout))


class TapedRecompute(Recompute):
    """A recomputation whose decisions are on a tape."""

    def __init__(self, part: Recompute, tape: Tape) -> None:
        self.part, self.tape = part, tape

    @property
    def needs(self) -> frozenset[str]:
        return self.part.needs

    @property
    def check_layer(self) -> int | None:
        return self.part.check_layer

    def choose(self, selection: Selection, inputs: SelectionInputs, layout: Layout) -> Tensor:
        return self.tape.decide(lambda: self.part.choose(selection, inputs, layout))

    def choose_after(self, checked: Checked, layout: Layout) -> Tensor:
        return self.tape.decide(lambda: self.part.choose_after(checked, layout))


LATER = [*CHUNKS[:3], CHUNKS[3][::-1], CHUNKS[4][::-1]]
FUTURES = {
    "another last chunk": (PROMPT.replace(CHUNKS[4], LATER[4]), [*CHUNKS[:4], LATER[4]], 4),
    "other last two": (
        PROMPT.replace(CHUNKS[3], LATER[3]).replace(CHUNKS[4], LATER[4]), LATER, 3,
    ),
    "another question": (PROMPT.replace("why?\nAnswer:", "who?\nResult:"), CHUNKS, 5),
}  # fmt: skip
"""Prompt, chunks, and the first chunk that is another one (5: none)."""

EAGER = {
    "samkv-guided": {"recompute": GuidedRecompute(ratio=0.3, hits=None)},
    "epic": {"recompute": EpicRecompute(first=12, last=6)},
    "cacheblend": {"recompute": CacheblendRecompute(ratio=0.4)},
    "a3": {"recompute": A3Recompute(ratio=0.4, layer=0)},
}
"""Methods with enough recomputed rows that some are in every chunk."""


@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("name", METHODS)
def test_no_row_attends_to_what_comes_after_it(engine: Engine, name: str, future: str) -> None:
    """Another future, and what was decided about the first one: no row before it may change.

    Decisions look ahead, and may: chunks compete with each other, and the question is asked first.
    They are taped, so that what is left is what rows attend to. Rows of a layer hold what all
    layers before it computed; the template between the chunks is always among them.
    """
    prompt, chunks, first = FUTURES[future]
    assert len(prompt) == len(PROMPT) and prompt != PROMPT
    engine.cache_chunks(chunks)
    tape = Tape()
    method = replace(METHODS[name], **EAGER.get(name, {}))
    taped = replace(
        method,
        select=TapedSelect(method.select, tape),
        recompute=TapedRecompute(method.recompute, tape),
    )
    _, one = first_logits(engine, PROMPT, CHUNKS, taped)
    tape.rewind()
    _, two = first_logits(engine, prompt, chunks, taped)
    assert tape.is_played
    changed_at = int((one.layout.token_ids != two.layout.token_ids).nonzero()[0])
    starts = (*one.layout.chunk_starts, one.layout.n_tokens)
    differ = 0.0
    assert changed_at >= (starts[first] if first < 5 else PROMPT.index("why?"))
    for layer in range(engine.model.n_layers):
        held = one.layout.uncached.clone()
        held[one.layout.context_positions] |= one.kept[layer, one.layout.block_of_token]
        before = int(held[:changed_at].sum())
        assert before > int(one.layout.uncached[:changed_at].sum()) > 20
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[layer] for q in (one, two))
            assert one.cache.lengths == two.cache.lengths
            torch.testing.assert_close(mine[:before], theirs[:before], **TOLERANCE)
            n_rows = one.cache.lengths[layer]
            after = (mine[before:n_rows] - theirs[before:n_rows]).abs()
            differ = max(differ, float(after.max()))
    assert differ > 0.01, "the futures are the same"


@pytest.mark.parametrize("name", ["recompute", "reuse", "ape", "samkv-guided", "cacheblend"])
def test_a_row_that_looked_ahead_would_be_noticed(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above on a pass whose mask lets every row see everything."""

    def blind(
        query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor, causal: bool
    ) -> Tensor:
        return attention(query, keys, values, scaling, None, False)

    monkeypatch.setattr(blend, "attention", blind)
    weigh = ApeAttention.__call__
    monkeypatch.setattr(ApeAttention, "__call__", lambda *given: weigh(*given[:5], None, given[6]))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_no_row_attends_to_what_comes_after_it(engine, name, "another last chunk")


# --- few bits ----------------------------------------------------------------------------------


def stored(engine: Engine, text: str) -> ChunkCache:
    assert isinstance(engine.store, MemoryStore)
    return engine.store._chunks[engine.fingerprint.digest, engine.key_of(text)]


@cache
def one_by_one(family: str, store_bits: int) -> Engine:
    """Chunks are prefilled alone, so that their keys are the same to the bit in every engine."""
    engine = Engine(tiny_model(family), block_size=8, store_bits=store_bits)
    for chunk in CHUNKS:
        engine.cache_chunk(chunk)
    return engine


def steps(coarse: ChunkCache) -> tuple[Tensor, Tensor]:
    """(L, T, G, D) steps of a chunk's keys, and (L, T, G, 1) of its values, from its bytes."""
    n_heads = coarse.fingerprint.n_kv_heads
    ranges = coarse.entries[..., -4 * n_heads :].contiguous().view(torch.float16).float()
    return key_steps(coarse), ranges[..., :n_heads, None]


def what_is_quantised(chunk: ChunkCache) -> tuple[Tensor, Tensor]:
    """(L, T, G, D) each: the transform of a chunk's keys, and its values."""
    keys, values = decoded(chunk)
    return transformed(keys), values


@cache
def noisy(exact: Engine, coarse: Engine, seed: int) -> Engine:
    """An engine whose caches hold the exact entries, each with uniform noise of half a step.

    Equal tokens of a chunk have the same noise, as equal keys have the same code: those of layer 0
    are equal, and those above it alike. (Errors of their own would average out over the tokens.)
    """
    engine = Engine(exact.model, block_size=8, store_bits=16)
    generator = torch.Generator().manual_seed(seed)
    for text in CHUNKS:
        engine.cache_chunk(text)
        chunk, form = stored(engine, text), engine.fingerprint.entry_format
        sides = []
        ways = zip(what_is_quantised(stored(exact, text)), steps(stored(coarse, text)), strict=True)
        for side, step in ways:
            n_layers, _, *size_of_one = side.shape
            size_of_all = (n_layers, engine.model.config.vocab_size, *size_of_one)
            noise = torch.rand(size_of_all, generator=generator) - 0.5
            sides.append(side + step * noise[:, chunk.token_ids])
        keys, values = transformed(sides[0]).float(), sides[1]
        with torch.inference_mode():
            chunk.entries.copy_(
                torch.stack([form.encode(*of)[0] for of in zip(keys, values, strict=True)])
            )
    return engine


def size(logits: Tensor) -> float:
    """Root mean square."""
    return float(logits.square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("store_bits", [4, 8])
def test_entries_of_few_bits_are_within_half_a_step(family: str, store_bits: int) -> None:
    """Of its channel of the transform for a key, of its token and head for a value; 1e-5 for
    float32 rounding."""
    exact, coarse = one_by_one(family, 16), one_by_one(family, store_bits)
    for text in CHUNKS:
        ways = zip(
            what_is_quantised(stored(exact, text)), what_is_quantised(stored(coarse, text)),
            steps(stored(coarse, text)), strict=True,
        )  # fmt: skip
        for true, found, step in ways:
            assert bool(((found - true).abs() <= step / 2 + 1e-5 * true.abs().max()).all())
            # not closer than few bits can be: an error that is uniform is a quarter step in size
            assert float((found - true).abs().mean()) > 0.15 * float(step.mean())


ORDERS = [[*CHUNKS[i:], *CHUNKS[:i]] for i in range(len(CHUNKS))]


def all_logits(engine: Engine, method: str) -> Tensor:
    """Of the first token and six after it, for the chunks in every turned order."""
    found = [
        engine.logits(
            "Read:\n" + "\n".join(order) + f"\n\n{len(order[0])} of what?", order,
            follow=(70, 9, 201, 33, 8, 61), method=method, eviction="none",
        )
        for order in ORDERS
    ]  # fmt: skip
    return torch.cat(found)


@pytest.mark.parametrize("method", ["reuse", "epic"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_few_bits_are_what_noise_of_half_a_step_is(family: str, method: str) -> None:
    """The tolerance of few bits, derived: errors are uniform within half a step, so they move the
    logits as much as any other uniform noise of that size.

    Heads look at a few tokens, so that the sizes of two draws may differ by half by chance, over
    these prompts together; twice leaves room for it.
    """
    exact = one_by_one(family, 16)
    true = all_logits(exact, method)
    for store_bits in (4, 8):
        coarse = one_by_one(family, store_bits)
        off = size(all_logits(coarse, method) - true)
        noise = [all_logits(noisy(exact, coarse, seed), method) - true for seed in range(3)]
        by_noise = size(torch.stack(noise))
        assert by_noise / 2 < off < by_noise * 2
        assert off < size(true) * (0.5 if store_bits == 4 else 0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_8_bits_are_17_times_closer_than_4(family: str) -> None:
    """A step is 1/255 of a range instead of 1/15, and errors this small move logits in proportion.

    Half to twice of that, as above: the sizes of two draws of rounding.
    """
    engines = [one_by_one(family, store_bits) for store_bits in (16, 8, 4)]
    true, eight, four = (all_logits(engine, "reuse") for engine in engines)
    assert 17 / 2 < size(four - true) / size(eight - true) < 17 * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("store_bits", [4, 8])
def test_chunks_reused_after_their_prefix_are_prefix_caching_within_a_step(
    family: str, store_bits: int
) -> None:
    """Each of the chunks, alone in its prompt."""
    exact, coarse = one_by_one(family, 16), one_by_one(family, store_bits)
    off, by_noise = [], []
    for chunk in CHUNKS:
        prompt = chunk + "\n\nQuestion: why?"
        reused, query = first_logits(coarse, prompt, [chunk], "reuse")
        plain = plain_logits(coarse.model, query.layout)
        off.append(reused - plain)
        for seed in range(3):
            reused, _ = first_logits(noisy(exact, coarse, seed), prompt, [chunk], "reuse")
            by_noise.append(reused - plain)
    assert size(torch.stack(off)) < 2 * size(torch.stack(by_noise))


# --- what the answer goes on with --------------------------------------------------------------

FOLLOW = (70, 9, 201, 33, 8, 61, 97, 115)


@pytest.mark.parametrize("method", ["reuse", "recompute", "samkv-guided", "samkv-fusion", "ape"])
@pytest.mark.parametrize("budget", [{"budget_ratio": 1.0}, {"budget_tokens": 5000}], ids=str)
def test_quest_with_room_for_all_is_no_eviction(
    engine: Engine, method: str, budget: dict[str, Any]
) -> None:
    """With 16 bits nothing is rounded but sums in another order."""
    dense = ask(engine, PROMPT, CHUNKS, method, eviction="none")
    sparse = ask(engine, PROMPT, CHUNKS, method, eviction=Quest(**budget))
    assert torch.equal(sparse.first.logits, dense.first.logits)
    assert sparse.report.kept_ratio == dense.report.kept_ratio
    torch.testing.assert_close(sparse.follow(FOLLOW), dense.follow(FOLLOW), **TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_token_has_seen_all_that_a_step_may_not(method: str) -> None:
    """A budget of the answer never touches the prompt's own pass."""
    engine = engine_of("llama", 4)
    few = ask(engine, PROMPT, CHUNKS, method, eviction=Quest(budget_tokens=64))
    dense = ask(engine, PROMPT, CHUNKS, method, eviction="none")
    assert torch.equal(few.first.logits, dense.first.logits)
    assert few.report.recompute_ratio == dense.report.recompute_ratio


def test_quest_with_little_room_is_not_no_eviction(engine: Engine) -> None:
    """Otherwise the laws of Quest could not fail."""
    dense = ask(engine, PROMPT, CHUNKS, "reuse", eviction="none").follow(FOLLOW)
    few = ask(engine, PROMPT, CHUNKS, "reuse", eviction=Quest(budget_tokens=64)).follow(FOLLOW)
    assert float((few - dense).abs().amax(1).min()) > 0.01
