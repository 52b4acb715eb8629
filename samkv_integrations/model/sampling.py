"""How the next token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model

SMALLEST = 1e-5
"""The smallest number that logits may be divided by: none becomes infinite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest token, and top_k and top_p change nothing then.
    top_k: how many of the likeliest tokens stay in the draw; 0 for all.
    repetition_penalty: above 1 makes tokens of prompt and answer less likely; None for that of the
        generation config.
    seed: makes sampling repeatable.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _SAMPLING_KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                words = "a whole number" if kind is int else "a number"
                raise InvalidOption(f"{name}={value!r}; it must be {words}")
        if self.max_new_tokens < 1:
            raise InvalidOption(f"max_new_tokens={self.max_new_tokens}; it must be at least 1")
        if self.temperature != 0 and not self.temperature >= SMALLEST:
            raise InvalidOption(
                f"temperature={self.temperature}; it must be 0 (greedy), or {SMALLEST} or more"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidOption(f"seed={self.seed}; it must fit into 64 bits")
        if not 0 < self.top_p <= 1:
            raise InvalidOption(f"top_p={self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidOption(f"top_k={self.top_k}; it must be 0 (all tokens) or more")
        if self.repetition_penalty is not None and not self.repetition_penalty >= SMALLEST:
            raise InvalidOption(
                f"repetition_penalty={self.repetition_penalty}; it must be {SMALLEST} or more "
                "(1 for none)"
            )


_SAMPLING_KINDS = {
    "max_new_tokens": int,
    "temperature": int | float,
    "top_p": int | float,
    "top_k": int,
    "repetition_penalty": int | float | None,
    "seed": int | None,
}


class Sampler:
    """Chooses one token after another for one answer; remembers what it chose."""

    def __init__(self, model: Model, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._ids = torch.tensor([list(prompt_ids)], device=model.device)
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator(device=model.device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = model.hf.generation_config.repetition_penalty
        if penalty not in (None, 1.0):
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))

    def next(self, logits: Tensor) -> int:
        """The token chosen from ``logits`` (vocabulary,)."""
        scores = self._processors(self._ids, logits[None].float())  # type: ignore[arg-type]
        if self._greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        self._ids = torch.cat((self._ids, token), dim=1)
        return int(token)
