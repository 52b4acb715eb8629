"""Nothing attends to what comes after it: another future changes no entry before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.base import Method, Recompute, Select
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.prompt.layout import Layout, Mask
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.papers.a3 import A3Recompute
from samkv_integrations.runtimes.transformers.papers.base import (
    Checked,
    LayerRecompute,
    ProbedLayer,
    SelectionInputs,
)
from samkv_integrations.runtimes.transformers.papers.cacheblend import CacheblendRecompute
from tests.support.covering import covering
from tests.support.laws import CHUNKS, PROMPT, TOLERANCE, first_logits
from tests.support.models import FAMILIES


class Tape:
    """What a method decided about one prompt, in order, to be decided again about another."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []
        self._at: int | None = None

    def rewind(self) -> None:
        self._at = 0

    def decide(self, decision: Callable[[], Any]) -> Any:
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

    def probe_blocks(self, layout: TensorLayout) -> Tensor | None:
        return self.part.probe_blocks(layout)

    def score(self, probed: ProbedLayer, layout: TensorLayout) -> Tensor:
        return self.part.score(probed, layout)

    def choose(
        self, scores: Tensor | None, inputs: SelectionInputs, layout: TensorLayout
    ) -> Tensor:
        return self.tape.decide(lambda: self.part.choose(scores, inputs, layout))


class TapedRecompute(LayerRecompute):
    """A recomputation whose decisions are on a tape."""

    def __init__(self, part: Recompute, tape: Tape) -> None:
        self.part, self.tape = part, tape

    @property
    def needs(self) -> frozenset[str]:
        return self.part.needs

    @property
    def check_layer(self) -> int | None:
        return self.part.check_layer

    def choose_layers(self, kept: Tensor, inputs: SelectionInputs, layout: TensorLayout) -> Tensor:
        return self.tape.decide(lambda: self.part.choose_layers(kept, inputs, layout))

    def choose_after(self, checked: Checked, layout: TensorLayout) -> Tensor:
        return self.tape.decide(lambda: self.part.choose_after(checked, layout))


class TapedTokens(Recompute):
    """A recomputation by token ids whose decisions are on a tape."""

    def __init__(self, part: Recompute, tape: Tape) -> None:
        self.part, self.tape = part, tape

    def choose(self, layout: Layout) -> Mask:
        return self.tape.decide(lambda: self.part.choose(layout))


def taped(method: Method, tape: Tape) -> Method:
    """The method, its decisions on a tape."""
    select, part = method.select, method.recompute
    return replace(
        method,
        select=select if select.keeps_all else TapedSelect(select, tape),
        recompute=TapedRecompute(part, tape) if part.by_layer else TapedTokens(part, tape),
    )


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
    "samkv-guided": {"recompute": GuidedRecompute(first=16)},
    "epic": {"recompute": EpicRecompute(first=12)},
    "cacheblend": {"recompute": CacheblendRecompute(ratio=0.4)},
    "a3": {"recompute": A3Recompute(ratio=0.4, layer=0)},
}
"""Methods with enough recomputed tokens that some are in every chunk."""


@pytest.mark.parametrize(
    ("engine", "future", "name"),
    covering(FAMILIES, list(FUTURES), list(METHODS), times=3),
    indirect=["engine"],
)
def test_no_token_attends_to_what_comes_after_it(engine: Engine, name: str, future: str) -> None:
    """Another future, and what was decided about the first one: no entry before it may change.

    Decisions look ahead, and may: chunks compete with each other, and the question is asked first.
    They are taped, so that what is left is what tokens attend to. Entries of a layer hold what all
    layers before it computed; the template between the chunks is always among them.
    """
    prompt, chunks, first = FUTURES[future]
    assert len(prompt) == len(PROMPT) and prompt != PROMPT
    engine.cache_chunks(chunks)
    tape = Tape()
    method = replace(METHODS[name], **EAGER.get(name, {}))
    _, one = first_logits(engine, PROMPT, CHUNKS, taped(method, tape))
    tape.rewind()
    _, two = first_logits(engine, prompt, chunks, taped(method, tape))
    assert tape.is_played
    changed_at = int((one.layout.token_ids != two.layout.token_ids).nonzero()[0])
    firsts = [tokens.start for tokens in one.layout.token_range]
    starts = (*one.layout.context_positions[firsts].tolist(), one.layout.n_tokens)
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
