"""A prompt's first token, together with what was planned on the way to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import Method
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.options import AnswerSettings
from samkv_integrations.plan.request import Request
from samkv_integrations.report import Report
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.passes import prompt as prompt_module
from samkv_integrations.runtimes.transformers.passes.decode import Decoder, decode
from samkv_integrations.runtimes.transformers.passes.pass_plan import PassPlan, plan_pass
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.first_token import FirstToken, first_token


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it was made from. keep: (L, Nb). recompute: (L, Tctx)."""

    keep: Tensor
    recompute: Tensor
    plan: PassPlan


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A first token. planned: the passes, the last of them the one that answered."""

    engine: Engine
    first: FirstToken
    planned: tuple[Planned, ...]

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout(self.first.layout)

    @property
    def cache(self) -> Any:
        return self.decoder().cache

    @property
    def report(self) -> Report:
        return self.first.report

    @property
    def kept(self) -> Tensor:
        """(L, Nb) bool, blocks that the answer goes on with."""
        return self.planned[-1].keep

    @property
    def recomputed(self) -> Tensor:
        """(L, Tctx) bool, stored tokens whose entry was computed anew at a layer."""
        layout = self.layout
        stored = ~layout.uncached[layout.context_positions]
        return self.planned[-1].recompute & self.kept[:, layout.block_of_token] & stored

    def decoder(self) -> Decoder:
        assert isinstance(self.first.sequence, Decoder)
        return self.first.sequence

    def follow(self, tokens: Sequence[int]) -> Tensor:
        """(n, vocabulary) logits after each of ``tokens``, which the cache keeps."""
        with torch.inference_mode():
            return torch.stack([next_logits(self.decoder(), token) for token in tokens])


def next_logits(decoder: Decoder, token: int) -> Tensor:
    """(vocabulary,) logits after the next token of one answer."""
    return decode([decoder], [[token]])[0][0]


def first_token_by(
    call: Callable[[Request], FirstToken],
    engine: Engine,
    prompt: str,
    chunks: Sequence[str] | None,
    method: Method | str,
    *,
    eviction: Eviction | str | None,
    capacity: int = 8,
) -> None:
    """An answer of ``capacity`` tokens is begun by ``call``, in place of `first_token`."""
    settings = AnswerSettings.of(method=method, eviction=eviction, on_miss="text")
    with engine.resolve(prompt, chunks) as resolved:
        request = engine.request(resolved, settings, capacity=capacity)
        engine.scheduler.run(lambda _: call(request))


def ask(
    engine: Engine,
    prompt: str,
    chunks: Sequence[str] | None,
    method: Method | str,
    *,
    eviction: Eviction | str | None = "none",
    capacity: int = 8,
) -> Asked:
    """The first token by ``method``, all entries of the prompt kept unless told otherwise."""
    planned: list[Planned] = []
    made: list[FirstToken] = []

    def noted(
        model: Model, layout: TensorLayout, keep: Tensor, recompute: Tensor, **options: Any
    ) -> PassPlan:
        plan = plan_pass(model, layout, keep, recompute, **options)
        planned.append(Planned(keep=keep, recompute=recompute, plan=plan))
        return plan

    def call(request: Request) -> FirstToken:
        made.append(first_token(request, Observer()))
        return made[-1]

    with mock.patch.object(prompt_module, "plan_pass", noted):
        first_token_by(call, engine, prompt, chunks, method, eviction=eviction, capacity=capacity)
    return Asked(engine=engine, first=made[0], planned=tuple(planned))


def announce(engine: Engine, texts: Sequence[str]) -> None:
    """Announce chunks, and wait until they are read; a question reads what has not begun."""
    engine.announce(texts)
    ends = time.monotonic() + 60
    while engine.chunks.reader.is_warming and time.monotonic() < ends:
        time.sleep(0.001)
