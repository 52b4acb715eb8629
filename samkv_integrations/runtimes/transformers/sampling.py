"""How the next token is chosen, with transformers' own logits processors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from samkv_integrations.option import declared
from samkv_integrations.options import Sampling, SamplingOptions
from samkv_integrations.runtimes.base import TokenMask
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.out_of_memory import told_of_memory

_WARPERS: Mapping[str, Callable[[Any], LogitsProcessor]] = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
"""The logits processors of transformers, in the order in which they are applied."""


class TransformersSampler:
    """Chooses the tokens of one answer, one after the other, and remembers them.

    mask: rules tokens out before all other processors, because top_k might keep forbidden tokens
        only.
    """

    def __init__(
        self, model: LayeredModel, prompt_ids: Sequence[int], sampling: Sampling,
        mask: TokenMask | None = None,
    ) -> None:  # fmt: skip
        self._ids = torch.tensor([list(prompt_ids)], device=model.device)
        self._n_prompt, self._mask = len(prompt_ids), mask
        self._is_greedy = sampling.is_greedy
        self._processors = LogitsProcessorList()
        penalty: Any = sampling.repetition_penalty
        if penalty is None:
            penalty = getattr(model.hf.generation_config, "repetition_penalty", None)
        if penalty not in (None, 1):
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if not self._is_greedy:
            options = declared(SamplingOptions)
            for name, warper in _WARPERS.items():
                if (value := getattr(sampling, name)) != options[name][1].default:
                    self._processors.append(warper(value))
            # `torch.Generator.seed` would open /dev/urandom, which fails a process that has too
            # many files open.
            drawn = secrets.randbits(64) if sampling.seed is None else sampling.seed
            self._generator = torch.Generator(device=model.device).manual_seed(drawn)

    def next(self, logits: Tensor) -> int:
        """The token chosen from ``logits`` (vocabulary,)."""
        token = self.next_if_sure(logits, 0.0)
        assert token is not None
        return token

    def next_if_sure(self, logits: Tensor, tolerance: float) -> int | None:
        """See `Sampler.next_if_sure`."""
        with told_of_memory(logits.device):
            return self._next(logits, tolerance)

    def _next(self, logits: Tensor, tolerance: float) -> int | None:
        scores = logits[None].float()
        if self._mask is not None:
            answer = self._ids[0, self._n_prompt :].tolist()
            allowed = torch.from_numpy(self._mask.allowed(scores.shape[-1], answer))
            scores = scores.masked_fill(~allowed.to(scores.device), float("-inf"))
        scores = self._processors(self._ids, scores)  # type: ignore[arg-type]
        if tolerance:
            first, second = scores.topk(2).values[0].tolist()
            if not self._is_greedy or first - second <= tolerance:
                return None
        if self._is_greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        self._ids = torch.cat((self._ids, token), dim=1)
        return int(token)
