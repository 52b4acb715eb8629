"""How the next token is chosen: one line of `SamplingOptions` an option."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, Unpack, get_args, get_type_hints

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

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model.model import Model

SMALLEST = 1e-5
"""The smallest number that logits may be divided by: none becomes infinite."""


@dataclass(frozen=True)
class Option:
    """One option of sampling.

    default: of an option that is not given; a None is allowed where it is the default.
    allows, bounds: whether a number is in range, and the range in words.
    warper: what transformers changes the logits with, None for nothing; not asked for None. Those
        of a greedy answer are left out, but for ``always``.
    """

    default: float | int | None
    allows: Callable[[Any], bool]
    bounds: str
    warper: Callable[[Any], LogitsProcessor | None] = lambda value: None
    always: bool = False


class SamplingOptions(TypedDict, total=False):
    """Options of `Engine.generate`, each with its bounds; their warpers run in this order.

    max_new_tokens: most tokens of the answer.
    seed: makes sampling repeatable.
    repetition_penalty: above 1 makes tokens of prompt and answer less likely; None for that of the
        generation config.
    temperature: 0 takes the likeliest token, and top_k, top_p and min_p change nothing then.
    top_k: how many of the likeliest tokens stay in the draw; 0 for all.
    top_p: the likeliest tokens that have this much of the probability together stay in the draw.
    min_p: tokens of at least this share of the likeliest one's probability stay in the draw
        (arXiv 2407.01082).
    """

    max_new_tokens: Annotated[int, Option(256, lambda n: n >= 1, "at least 1")]
    seed: Annotated[
        int | None, Option(None, lambda n: -(2**63) <= n < 2**64, "a number of at most 64 bits")
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            None,
            lambda penalty: SMALLEST <= penalty < math.inf,
            f"{SMALLEST} or more (1 for none) and finite",
            lambda r: None if r == 1 else RepetitionPenaltyLogitsProcessor(float(r)),
            always=True,
        ),
    ]
    temperature: Annotated[
        float,
        Option(
            0.0,
            lambda t: t == 0 or SMALLEST <= t < math.inf,
            f"0 (greedy), or {SMALLEST} or more and finite",
            lambda t: TemperatureLogitsWarper(float(t)),
        ),
    ]
    top_k: Annotated[
        int,
        Option(
            0,
            lambda k: k >= 0,
            "0 (all tokens) or more",
            lambda k: TopKLogitsWarper(k) if k else None,
        ),
    ]
    top_p: Annotated[
        float,
        Option(
            1.0,
            lambda p: 0 < p <= 1,
            "above 0 and at most 1",
            lambda p: TopPLogitsWarper(float(p)) if p < 1 else None,
        ),
    ]
    min_p: Annotated[
        float,
        Option(
            0.0,
            lambda p: 0 <= p <= 1,
            "between 0 (all tokens) and 1",
            lambda p: MinPLogitsWarper(float(p)) if p else None,
        ),
    ]


_HINTS = {
    name: get_args(hint)
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
}
OPTIONS: Mapping[str, Option] = MappingProxyType({n: of[1] for n, of in _HINTS.items()})
"""The options by name, in the order of their warpers."""


@dataclass(frozen=True, init=False)
class Sampling:
    """Options that were given, checked, and the defaults of all others.

    Raises:
        UnknownOption: there is no such option.
        InvalidOption: a value is no number of the right kind, or out of range.
    """

    items: tuple[tuple[str, float | int | None], ...]

    def __init__(self, **given: Unpack[SamplingOptions]) -> None:
        options: Mapping[str, Any] = given
        for name in options.keys() - OPTIONS.keys():
            raise UnknownOption.among("option of sampling", name, OPTIONS)
        items = (
            (name, _checked(name, options[name]) if name in options else option.default)
            for name, option in OPTIONS.items()
        )
        object.__setattr__(self, "items", tuple(items))

    @property
    def values(self) -> Mapping[str, float | int | None]:
        """Every option by name."""
        return dict(self.items)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of the answer."""
        return int(self.values["max_new_tokens"] or 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.values["temperature"] == 0

    def warpers(self, model: Model) -> LogitsProcessorList:
        """What changes the logits before a token is taken, in order."""
        config: Any = model.hf.generation_config
        found = LogitsProcessorList()
        for name, value in self.items:
            option = OPTIONS[name]
            if value is None:
                value = getattr(config, name, None) if option.always else None
            if value is None or (self.is_greedy and not option.always):
                continue
            if (warper := option.warper(value)) is not None:
                found.append(warper)
        return found


def _checked(name: str, value: Any) -> float | int | None:  # noqa: ANN401
    option, hint = OPTIONS[name], _HINTS[name][0]
    kinds = get_args(hint) or (hint,)
    if value is None and option.default is None:
        return None
    is_whole = int in kinds
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise InvalidOption(
            f"{name}={value!r}; it must be {'a whole number' if is_whole else 'a number'}"
        )
    if not option.allows(value):  # false for a NaN too
        raise InvalidOption(f"{name}={value}; it must be {option.bounds}")
    return value


class Sampler:
    """Chooses one token after another for one answer; remembers what it chose.

    constraint: rules tokens out before anything else: of what top_k leaves, none might be allowed.
    """

    def __init__(
        self,
        model: Model,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        constraint: LogitsProcessor | None = None,
    ) -> None:
        self._ids = torch.tensor([list(prompt_ids)], device=model.device)
        self._greedy = sampling.is_greedy
        self._warpers = sampling.warpers(model)
        if constraint is not None:
            self._warpers.insert(0, constraint)
        self._generator = None if self._greedy else _generator(model, sampling.values["seed"])

    def next(self, logits: Tensor) -> int:
        """The token chosen from ``logits`` (vocabulary,)."""
        scores = self._warpers(self._ids, logits[None].float())  # type: ignore[arg-type]
        if self._greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        self._ids = torch.cat((self._ids, token), dim=1)
        return int(token)


def _generator(model: Model, seed: float | None) -> torch.Generator:
    """What draws tokens. A seed that is not given is drawn without a file descriptor.

    `torch.Generator.seed` opens /dev/urandom, which fails a process that has too many files open.
    """
    drawn = secrets.randbits(64) if seed is None else int(seed)
    return torch.Generator(device=model.device).manual_seed(drawn)
