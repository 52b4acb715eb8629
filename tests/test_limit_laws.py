"""The limit laws: what every method must equal at the ends of its range, on every family.

Logits are compared in float32; 2e-4 is far below what a single wrong row or position changes in
these models (their logits spread over tens) and above the rounding of another summation order.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.layout import Layout, Selection
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.parts import Fusion, Method, RecomputeAll, RecomputeNone
from samkv_integrations.methods.samkv import SamkvSelect
from samkv_integrations.model import Model
from samkv_integrations.query import Query
from tests.models import FAMILIES, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def words(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghij klmnop\nqrs") for _ in range(n)).strip() or "x"


CHUNKS = [words(seed, n) for seed, n in enumerate((90, 41, 7, 66, 24))]
PROMPT = "Read:\n\n" + "\n\n-- more\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"


def first_logits(
    engine: Engine, prompt: str, chunks: list[str], method: Method | str
) -> tuple[Tensor, Query]:
    chosen = METHODS[method] if isinstance(method, str) else method
    stable = engine._stable_layers() if "statistics" in chosen.reads else ()
    with torch.inference_mode(), engine._resolver().resolve(prompt, chunks) as resolved:
        query = Query(engine.model, chosen, resolved, engine.fingerprint, engine.prefix, stable)
        return query.first_logits(8), query


def plain_logits(model: Model, layout: Layout) -> Tensor:
    """The plain forward of transformers over the same token ids."""
    with torch.inference_mode():
        logits: Tensor = model.hf(layout.token_ids[None]).logits[0, -1]
        return logits


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
        "samkv-guided": GuidedSelect(max_kept_ratio=1.0),
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
    select = GuidedSelect(max_kept_ratio=1.0, probe=probe)
    method = replace(METHODS["samkv-guided"], select=select, recompute=RecomputeNone())
    guided, query = first_logits(engine, PROMPT, CHUNKS, method)
    assert query.report(1.0).kept_ratio == 1.0
    reused, _ = first_logits(engine, PROMPT, CHUNKS, "reuse")
    torch.testing.assert_close(guided, reused, **TOLERANCE)


@pytest.mark.parametrize("name", ["samkv-overwrite", "samkv-guided"])
def test_fusion_with_weight_one_is_overwrite(engine: Engine, name: str) -> None:
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.1, heads=2))
    overwritten, _ = first_logits(engine, PROMPT, CHUNKS, method)
    fused, _ = first_logits(engine, PROMPT, CHUNKS, replace(method, update=Fusion(weight=1.0)))
    torch.testing.assert_close(fused, overwritten, **TOLERANCE)


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
        one, _ = first_logits(engine, PROMPT, CHUNKS, name)
        two, _ = first_logits(other, PROMPT, CHUNKS, name)
        torch.testing.assert_close(one, two, **TOLERANCE)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "recompute"])
def test_no_method_changes_an_exact_first_chunk(engine: Engine, name: str) -> None:
    """Rows of the first chunk that are kept at all must be those of full prefill."""
    prompt = "\n\n".join(CHUNKS) + "\n\nQuestion: why?"
    method = METHODS[name]
    if name == "samkv-guided":
        method = replace(method, recompute=GuidedRecompute(ratio=0.3, heads=4))
    _, query = first_logits(engine, prompt, CHUNKS, method)
    _, full = first_logits(engine, prompt, CHUNKS, "recompute")
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
