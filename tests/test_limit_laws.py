"""The limit laws: what every method must equal at the ends of its range, on every family.

Logits are compared in float32; 2e-4 is far below what a single wrong row or position changes in
these models (their logits spread over tens) and above the rounding of another summation order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samkv_integrations.blend import Blend, as_heads
from samkv_integrations.decode import Decoder
from samkv_integrations.engine import Engine
from samkv_integrations.layout import Layout, Selection
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.a3 import A3Recompute
from samkv_integrations.methods.ape import ApeAttention
from samkv_integrations.methods.cacheblend import CacheblendRecompute
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.multi_infllm import MultiInfllmSelect
from samkv_integrations.methods.parts import (
    Checked,
    Evidence,
    Fusion,
    Method,
    Probe,
    Recompute,
    RecomputeAll,
    RecomputeNone,
    Select,
    Update,
    overwrite,
)
from samkv_integrations.methods.samkv import SamkvSelect
from samkv_integrations.model import Model, attention
from samkv_integrations.query import Query
from tests.models import FAMILIES, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def words(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghij klmnop\nqrs") for _ in range(n)).strip() or "x"


CHUNKS = [words(seed, n) for seed, n in enumerate((90, 41, 7, 66, 24))]
FROM_THE_START = "\n\n".join(CHUNKS) + "\n\nQuestion: why?"
PROMPT = "Read:\n\n" + "\n\n-- more\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"


def first_logits(
    engine: Engine, prompt: str, chunks: list[str], method: Method | str
) -> tuple[Tensor, Query]:
    chosen = METHODS[method] if isinstance(method, str) else method
    stable = engine._stable_layers() if "statistics" in chosen.reads else ()
    with torch.inference_mode(), engine.resolve(prompt, chunks) as resolved:
        query = Query(engine.model, chosen, resolved, engine.fingerprint, engine.prefix, stable)
        return query.first_logits(8), query


def plain_logits(model: Model, layout: Layout) -> Tensor:
    """The plain forward of transformers over the same token ids."""
    with torch.inference_mode():
        logits: Tensor = model.hf(layout.token_ids[None]).logits[0, -1]
        return logits


def assert_same_answer(query: Query, logits: Tensor, expected: Tensor, other: Query) -> None:
    """The same first token, and the same rows for those after it."""
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert query.cache.lengths == other.cache.lengths
    for layer, n_rows in enumerate(query.cache.lengths):
        for side in ("keys", "values"):
            mine, theirs = (getattr(q.cache, side)[layer][:n_rows] for q in (query, other))
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Engine:
    engine = Engine(tiny_model(request.param), block_size=8)
    engine.cache_chunks(CHUNKS)
    return engine


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
    longer = Engine(engine.model, block_size=8, prefix_text=system)
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
        "samkv-guided": GuidedSelect(max_kept_ratio=1.0, reads_ratio=1.0),
    }[name]
    method = replace(METHODS[name], select=select, recompute=RecomputeAll())
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    torch.testing.assert_close(logits, plain_logits(engine.model, query.layout), **TOLERANCE)


class KeepAll(SamkvSelect):
    """SamKV's probe and evidence, every block kept."""

    def choose(self, queries, evidence, layout) -> Selection:  # noqa: ANN001
        chosen = super().choose(queries, evidence, layout)
        return Selection(keep=torch.ones_like(chosen.keep))


@pytest.mark.parametrize("probe", ["probe", "layerwise"])
def test_guided_keeping_all_is_reuse(engine: Engine, probe: str) -> None:
    select = GuidedSelect(max_kept_ratio=1.0, reads_ratio=1.0, probe=probe)
    for recompute in (RecomputeNone(), GuidedRecompute(ratio=0.0)):
        method = replace(METHODS["samkv-guided"], select=select, recompute=recompute)
        guided, query = first_logits(engine, PROMPT, CHUNKS, method)
        assert query.report(1.0).kept_ratio == 1.0
        assert_same_answer(query, guided, *first_logits(engine, PROMPT, CHUNKS, "reuse"))


@pytest.mark.parametrize("probe", ["probe", "layerwise"])
def test_guided_recomputing_all_is_recompute(engine: Engine, probe: str) -> None:
    select = GuidedSelect(max_kept_ratio=1.0, reads_ratio=1.0, probe=probe)
    for recompute in (RecomputeAll(), GuidedRecompute(ratio=1.0, lead_layers=1.0)):
        method = replace(METHODS["samkv-guided"], select=select, recompute=recompute)
        guided, query = first_logits(engine, PROMPT, CHUNKS, method)
        full = first_logits(engine, PROMPT, CHUNKS, "recompute")
        assert_same_answer(query, guided, *full)
        assert query.report(1.0).recompute_ratio == 1.0


def test_guided_without_anything_to_read_is_the_question_alone(engine: Engine) -> None:
    """The other end: what is kept is loaded afterwards, but the first token has seen none of it."""
    select = GuidedSelect(max_kept_ratio=1.0, reads_ratio=0.001, min_tokens=0)
    method = replace(METHODS["samkv-guided"], select=select, recompute=RecomputeNone())
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    ids, fresh = query.layout.token_ids, query.layout.fresh
    with torch.inference_mode():
        alone = engine.model.hf(ids[fresh][None], position_ids=fresh.nonzero()[:, 0][None])
    torch.testing.assert_close(logits, alone.logits[0, -1], **TOLERANCE)
    assert query.report(1.0).kept_ratio == 1.0


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
def test_recomputing_every_token_is_recompute(engine: Engine, method: Method) -> None:
    for prompt in (PROMPT, FROM_THE_START):
        logits, query = first_logits(engine, prompt, CHUNKS, method)
        assert_same_answer(query, logits, *first_logits(engine, prompt, CHUNKS, "recompute"))
        exact = len(CHUNKS[0]) if query.layout.exact[0] else 0
        n_context = query.layout.n_context
        assert query.report(1.0).recompute_ratio == (n_context - exact) / n_context


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
def test_recomputing_nothing_of_everything_is_reuse(engine: Engine, method: Method) -> None:
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    assert_same_answer(query, logits, *first_logits(engine, PROMPT, CHUNKS, "reuse"))
    assert query.report(1.0).recompute_ratio == 0.0


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
    assert query.report(1.0).recompute_ratio == (layer + 1) / engine.model.n_layers
    # neither end: the question has read what lower layers computed again and upper ones kept. Only
    # the keys and values of layer 0 are of a token by itself, the same however often they are made
    for other in (full, reused) if layer else (full,):
        assert float((logits - other).abs().max()) > 0.01


def test_ape_without_temperature_and_scale_is_reuse_local(engine: Engine) -> None:
    method = replace(METHODS["ape"], attend=ApeAttention(temperature=1.0, scale=1.0))
    logits, query = first_logits(engine, PROMPT, CHUNKS, method)
    local, of_local = first_logits(engine, PROMPT, CHUNKS, "reuse-local")
    assert_same_answer(query, logits, local, of_local)
    mine = Decoder(engine.model, query.cache, query.layout.n_tokens, attend=method.attend)
    plain = Decoder(engine.model, of_local.cache, query.layout.n_tokens)
    sharp = Decoder(
        engine.model,
        first_logits(engine, PROMPT, CHUNKS, method)[1].cache,
        query.layout.n_tokens,
        attend=ApeAttention(temperature=0.5),
    )
    with torch.inference_mode():
        for token in (70, 9, 201, 33, 8, 61):
            expected = plain.step(token)
            torch.testing.assert_close(mine.step(token), expected, **TOLERANCE)
            assert float((sharp.step(token) - expected).abs().max()) > 0.05
    texts = [
        engine.generate(PROMPT, CHUNKS, method=m, max_new_tokens=8).text
        for m in (method, "reuse-local")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "name", ["samkv-overwrite", "samkv-guided", "epic", "cacheblend", "a3", "recompute"]
)
def test_fusion_with_weight_one_is_overwrite(engine: Engine, name: str) -> None:
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.3))
    overwritten, of_overwrite = first_logits(engine, PROMPT, CHUNKS, method)
    assert of_overwrite.report(1.0).recompute_ratio > 0.1
    fused, query = first_logits(engine, PROMPT, CHUNKS, replace(method, update=Fusion(weight=1.0)))
    assert_same_answer(query, fused, overwritten, of_overwrite)


def test_fusion_with_weight_zero_is_reuse(engine: Engine) -> None:
    method = replace(METHODS["recompute"], update=Fusion(weight=0.0))
    unchanged, _ = first_logits(engine, PROMPT, CHUNKS, method)
    reused, _ = first_logits(engine, PROMPT, CHUNKS, "reuse")
    torch.testing.assert_close(unchanged, reused, **TOLERANCE)


def test_order_of_ingest_does_not_matter(engine: Engine) -> None:
    other = Engine(engine.model, block_size=8)
    for chunk in reversed(CHUNKS):
        other.cache_chunk(chunk)
    for name in METHODS:
        one, of_one = first_logits(engine, PROMPT, CHUNKS, name)
        two, of_two = first_logits(other, PROMPT, CHUNKS, name)
        assert_same_answer(of_one, one, two, of_two)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "recompute"])
def test_no_method_changes_an_exact_first_chunk(engine: Engine, name: str) -> None:
    """Rows of the first chunk that are kept at all must be those of full prefill."""
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.3))
    _, query = first_logits(engine, FROM_THE_START, CHUNKS, method)
    _, full = first_logits(engine, FROM_THE_START, CHUNKS, "recompute")
    layout = query.layout
    assert layout.exact.tolist() == [True] + [False] * (len(CHUNKS) - 1)
    kept = query._blend.kept[:, layout.block_of_token] & (layout.chunk_of_token == 0)
    assert kept.any()
    for layer in range(engine.model.n_layers):
        first = layout.context_positions[kept[layer]]
        before = int(layout.fresh[: len(engine.prefix)].sum())
        rows = slice(before, before + len(first))
        for mine, exact in (
            (query.cache.keys, full.cache.keys),
            (query.cache.values, full.cache.values),
        ):
            torch.testing.assert_close(mine[layer][rows], exact[layer][first], **TOLERANCE)
    # and none of them is computed again
    of_first = layout.chunk_of_token == 0
    assert not bool(query._blend._recompute[:, of_first].any())


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_of_one_exact_chunk_reads_and_computes_no_more_than_reuse(
    engine: Engine, name: str
) -> None:
    """There is nothing to decide about: a check of nothing, a share of nothing."""
    prompt = CHUNKS[0] + "\n\nQuestion: why?"
    logits, query = first_logits(engine, prompt, CHUNKS[:1], name)
    assert bool(logits.isfinite().all())
    if METHODS[name].select.probe == "none" and METHODS[name].attend is None:
        plain = plain_logits(engine.model, query.layout)
        torch.testing.assert_close(logits, plain, **TOLERANCE)
    if name != "recompute":
        assert query.report(1.0).recompute_ratio == 0.0


@pytest.mark.parametrize("update", [overwrite, Fusion()])
def test_guided_on_a_small_context_is_full_prefill(engine: Engine, update: Update) -> None:
    chunks = [CHUNKS[1], CHUNKS[4]]  # 65 tokens
    for prompt in ("Read:\n\n" + "\n\n".join(chunks) + "\n\nQuestion: why?", chunks[0] + "?"):
        asked = [chunk for chunk in chunks if chunk in prompt]
        for small, is_whole in ((65, True), (64, len(asked) == 1), (0, False)):
            method = METHODS["samkv-guided"]
            recompute = replace(method.recompute, small_context=small)
            select = replace(method.select, min_tokens=8)
            method = replace(method, select=select, recompute=recompute, update=update)
            logits, query = first_logits(engine, prompt, asked, method)
            report = query.report(1.0)
            if is_whole:
                plain = plain_logits(engine.model, query.layout)
                torch.testing.assert_close(logits, plain, **TOLERANCE)
                exact = query.layout.exact[query.layout.chunk_of_token].sum()
                computed = 1 - int(exact) / query.layout.n_context
                assert report.recompute_ratio == pytest.approx(computed)
            assert (report.kept_ratio == 1) == is_whole


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
    def reads(self) -> frozenset[str]:
        return self.part.reads

    @property
    def probe(self) -> Probe:
        return self.part.probe

    @property
    def window(self) -> int | None:
        return self.part.window

    def probe_blocks(self, layout: Layout) -> Tensor:
        return self.part.probe_blocks(layout)

    def choose(self, queries: Tensor | None, evidence: Evidence, layout: Layout) -> Selection:
        return self.tape.decide(lambda: self.part.choose(queries, evidence, layout))

    def read(self, queries: Tensor, seen: Tensor, evidence: Evidence, layout: Layout) -> Tensor:
        return self.tape.decide(lambda: self.part.read(queries, seen, evidence, layout))


class TapedRecompute(Recompute):
    """A recomputation whose decisions are on a tape."""

    def __init__(self, part: Recompute, tape: Tape) -> None:
        self.part, self.tape = part, tape

    @property
    def reads(self) -> frozenset[str]:
        return self.part.reads

    @property
    def check_layer(self) -> int | None:
        return self.part.check_layer

    def rows(self, selection: Selection, evidence: Evidence, layout: Layout) -> Tensor:
        return self.tape.decide(lambda: self.part.rows(selection, evidence, layout))

    def rows_after(self, checked: Checked, layout: Layout) -> Tensor:
        return self.tape.decide(lambda: self.part.rows_after(checked, layout))


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
    "samkv-guided": {"recompute": GuidedRecompute(ratio=0.3)},
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
        held = one.layout.fresh.clone()
        held[one.layout.context_positions] |= one._blend.kept[layer, one.layout.block_of_token]
        before = int(held[:changed_at].sum())
        assert before > int(one.layout.fresh[:changed_at].sum()) > 20
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

    def blind(blend: Blend, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:  # noqa: ANN401
        return attention(query, as_heads(keys), as_heads(values), rest[0], None, False)

    monkeypatch.setattr(Blend, "_attention", blind)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_no_row_attends_to_what_comes_after_it(engine, name, "another last chunk")
