"""The options of one answer: as keyword arguments, and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from samkv_integrations.engine.options import OwnAnswerOptions, check_options
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction import Eviction
from samkv_integrations.methods import Method, get_method
from samkv_integrations.model.sampling import OPTIONS, Sampling, SamplingOptions
from samkv_integrations.prompt.resolve import OnMiss


class AnswerOptions(SamplingOptions, OwnAnswerOptions, total=False):
    """Options of `Engine.generate` and `Engine.stream`."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """`AnswerOptions`, checked as far as they can be without a model. None is the engine's own."""

    sampling: Sampling
    method: Method | None = None
    eviction: str | Eviction | None = None
    context_window: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    json_schema: Mapping[str, Any] | None = None
    timeout: float | None = None
    on_miss: OnMiss = "compute"
    draft: int = 7

    @classmethod
    def of(cls, **options: Unpack[AnswerOptions]) -> AnswerSettings:
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        given: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in options.items():
            if name not in AnswerOptions.__annotations__:
                raise UnknownOption.among(
                    "option of an answer", name, AnswerOptions.__annotations__
                )
            (sampling if name in OPTIONS else given)[name] = value
        if given.get("method") is not None:
            given["method"] = get_method(given["method"])
        return cls(sampling=Sampling(**sampling), **given)

    def __post_init__(self) -> None:
        check_options(OwnAnswerOptions, vars(self))
        if self.json_schema is not None and self.stop:
            raise InvalidOption(
                f"stop={self.stop!r} with json_schema: a stop string could cut the JSON, which "
                "ends by itself; leave out either"
            )
