"""The blend and the decoder against a dense reference that keeps lists, not masks.

The reference runs the model's own submodules layer by layer. For every layer it writes down which
entries (position, key, value) there are, and every token attends, by a softmax written out here, to
those at its own and earlier positions. Nothing of it is shared with the package but the
way back from stored bytes (`test_quantise.py`): not the rotation, not the attention,
not the sets of tokens. Both sides take the same numbers from the caches, so nothing depends on
their bits.

Everything is float32. The two sides add up the same numbers in another order, which moves the
logits and keys of these models (of up to 6) by about 2e-5 after four layers; one wrong token,
position or entry moves them by a hundredth at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from samkv_integrations.runtimes.transformers.papers.base import Update
from samkv_integrations.runtimes.transformers.passes.decode import Decoder
from tests.support.asking import next_logits
from tests.support.blend_reference import (
    CLOSE,
    LAYERS,
    UPDATES,
    assert_equal,
    blended,
    case_of,
    reference,
)
from tests.support.covering import covering
from tests.support.models import FAMILIES, tiny_model, turned


@pytest.mark.parametrize(
    ("family", "update", "weight"),
    [(family, *update) for family, update in covering(FAMILIES, UPDATES)],
)
def test_any_selection_and_any_tokens_equal_the_dense_reference(
    family: str, update: Update | None, weight: float | None | str
) -> None:
    model = tiny_model(family)
    only_carried = 0
    for seed in range(2):
        case = case_of(seed, prefix=(1,) if seed else ())
        done = blended(model, case, update=update)
        expected = reference(model, case, weight=weight)
        assert_equal(done, expected, case)
        only_carried += expected.n_only_carried
        assert len(set(done.cache.lengths)) > 1, "layers should hold different numbers of entries"
    assert only_carried > 10, "no token passed through a layer where its block is not kept"


@pytest.mark.parametrize(
    ("lengths", "shares"),
    covering(
        [(1,), (3,), (30,), (9, 1, 14, 4)],
        [(0.0, 0.0), (0.3, 0.0), (0.5, 1.0), (1.0, 0.3)],
    ),
    ids=str,
)
def test_any_lengths_and_shares(lengths: tuple[int, ...], shares: tuple[float, float]) -> None:
    kept, stale = shares
    model = tiny_model("llama")
    for seed in (5, 6):
        case = case_of(seed, lengths=lengths, kept=kept, stale=stale)
        done = blended(model, case)
        assert_equal(done, reference(model, case), case)


CUT_AT_BOTH_ENDS = ([range(3, 20)], [range(1, 5)], [range(9, 17)])
IN_PIECES = ([range(7), range(7, 15), range(18, 22)], [range(5)], [range(2, 6), range(15, 17)])
PARTS: dict[str, Sequence[Sequence[range]]] = {"cut": CUT_AT_BOTH_ENDS, "in pieces": IN_PIECES}


@pytest.mark.parametrize(
    ("shares", "family", "cuts", "ends_with_chunk"),
    [
        ((1.0, 0.0), "llama", "in pieces", True),
        ((0.6, 0.4), "llama3-rope", "cut", False),
        ((0.6, 0.4), "qwen3", "in pieces", True),
        ((1.0, 1.0), "llama", "cut", False),
    ],
)
def test_chunks_of_which_the_prompt_holds_a_part(
    shares: tuple[float, float], family: str, cuts: str, ends_with_chunk: bool
) -> None:
    """Each token has the entry of its own place in the chunk, turned to its place in the prompt."""
    (kept, stale), parts = shares, PARTS[cuts]
    model = tiny_model(family)
    for seed, (update, weight) in enumerate(UPDATES):
        case = case_of(
            seed, cuts=parts, kept=kept, stale=stale, ends_with_chunk=ends_with_chunk,
            prefix=(1,) if seed else (),
        )  # fmt: skip
        assert case.layout.n_context == sum(len(run) for of_chunk in parts for run in of_chunk)
        done = blended(model, case, update=update, capacity=3)
        expected = reference(model, case, weight=weight)
        assert_equal(done, expected, case)
        if kept == stale == 1.0 and update is None:
            with torch.inference_mode():
                plain = model.hf(torch.tensor([case.ids])).logits[0, -1]
            torch.testing.assert_close(done.logits, plain, **CLOSE)
        decoder = Decoder(model, done.cache, case.layout.n_tokens)
        with torch.inference_mode():
            for token in (70, 9, 201):
                torch.testing.assert_close(
                    next_logits(decoder, token), expected.step(token), **CLOSE
                )


def test_keys_stay_where_they_were_prefilled_with_local_positions() -> None:
    model = tiny_model("llama")
    for seed, prefix in enumerate([(1,), (), (1, 40, 41)]):
        case = case_of(seed, prefix=prefix, stale=0.0)
        done = blended(model, case, positions="local")
        assert_equal(done, reference(model, case, positions="local"), case)
        elsewhere = reference(model, case).logits
        assert float((done.logits - elsewhere).abs().max()) > 0.05


def test_tokens_to_recompute_that_are_not_kept_are_ignored() -> None:
    """What `LayerRecompute.choose_layers` promises to those who write a method."""
    model = tiny_model("llama")
    case = case_of(1)
    anywhere = torch.rand(case.recompute.shape, generator=torch.Generator().manual_seed(9)) < 0.4
    of_kept = anywhere & case.keep[:, case.layout.block_of_token]
    assert int(anywhere.sum()) > int(of_kept.sum())
    done = blended(model, case, recompute=anywhere)
    masked = replace(case, recompute=of_kept)
    assert_equal(done, reference(model, masked), masked)


@pytest.mark.parametrize(("family", "ends_with_chunk"), [("llama", False), ("qwen3", True)])
def test_a_probe_shows_the_queries_of_every_token_that_it_computed(
    family: str, ends_with_chunk: bool
) -> None:
    """Rotated, layer by layer."""
    model = tiny_model(family)
    case = case_of(2, ends_with_chunk=ends_with_chunk, stale=0.0)
    done, expected = blended(model, case, probes=True), reference(model, case)
    torch.testing.assert_close(done.logits, expected.logits, **CLOSE)
    assert done.cache.lengths == [0] * LAYERS, "a probe keeps nothing"
    rows = case.layout.uncached.nonzero()[:, 0].tolist()
    assert len(done.probed) == LAYERS
    for layer, probed in enumerate(done.probed):
        own = [turned(expected.queries[layer][at], at, model) for at in rows]
        torch.testing.assert_close(probed.queries, torch.stack(own, dim=1), **CLOSE)


@pytest.mark.parametrize("family", ["llama3-rope", "qwen3"])
def test_the_reference_is_transformers_when_nothing_is_cached(family: str) -> None:
    model, case = tiny_model(family), case_of(0, kept=1.0, stale=1.0)
    assert bool(case.recompute.all())
    with torch.inference_mode():
        plain = model.hf(torch.tensor([case.ids])).logits[0, -1]
    torch.testing.assert_close(reference(model, case).logits, plain, **CLOSE)
