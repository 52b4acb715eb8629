"""The options of an engine, and of one answer, each declared once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args

from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.eviction import Eviction, get_eviction
from samkv_integrations.methods import Method, get_method
from samkv_integrations.model.constraint import check_json_schema
from samkv_integrations.model.sampling import OPTIONS, Sampling, SamplingOptions
from samkv_integrations.prompt.resolve import OnMiss

PrefixPolicy = Literal["bos", "none"]


class EngineOptions(TypedDict, total=False):
    """What an engine can be told beside its model and its store; see `Engine`."""

    method: str | Method
    eviction: str | Eviction | None
    block_size: int | Literal["auto"]
    prefix: PrefixPolicy
    prefix_text: str
    store_bits: int
    prefix_bytes: int


class AnswerOptions(SamplingOptions, total=False):
    """Options of `Engine.generate` and `Engine.stream`: those of sampling, and these.

    method, eviction: in place of the engine's for this answer; ``eviction="none"`` for none.
    context_window: tokens that prompt and answer may have together, if fewer than the model's.
    stop, stop_ids: strings and token ids that end the answer and are no part of it.
    json_schema: a JSON schema, which the answer keeps to; see `JsonConstraint`. One that reaches
        max_new_tokens is cut, and its finish_reason is ``length``. Needs the extra ``structured``.
    on_miss: what to do for a chunk without a usable cache: ``compute`` (as a chunk, and keep it;
        ``auto`` only where that does not take longer than full prefill, ``recompute`` never),
        ``text`` (compute it with the rest of the prompt, keep nothing), ``error``. What turns out
        damaged only while it is read is computed as ``text`` by both of them.
    """

    method: str | Method | None
    eviction: str | Eviction | None
    context_window: int | None
    stop: Sequence[str]
    stop_ids: Collection[int]
    json_schema: Mapping[str, Any] | None
    on_miss: OnMiss


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
    on_miss: OnMiss = "compute"

    @classmethod
    def of(cls, **options: Unpack[AnswerOptions]) -> AnswerSettings:
        """From keyword arguments. Raises InvalidOption or UnknownOption for what is wrong."""
        given: dict[str, Any] = dict(options)
        sampling = {name: given.pop(name) for name in OPTIONS if name in given}
        for name in given.keys() - AnswerOptions.__annotations__.keys():
            raise UnknownOption.among("option of an answer", name, AnswerOptions.__annotations__)
        if given.get("method") is not None:
            given["method"] = get_method(given["method"])
        return cls(sampling=Sampling(**sampling), **given)

    def __post_init__(self) -> None:
        get_eviction(self.eviction)
        window = self.context_window
        if window is not None and (type(window) is not int or window < 1):
            raise InvalidOption(
                f"context_window={window!r}; it must be a whole number of at least 1"
            )
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
            if self.stop:
                raise InvalidOption(
                    f"stop={self.stop!r} with json_schema: a stop string could cut the JSON, which "
                    "ends by itself; leave out either"
                )
        check_on_miss(self.on_miss)


def check_on_miss(on_miss: str) -> None:
    """Raises InvalidOption if ``on_miss`` is nothing that can be done for a missed chunk."""
    if on_miss not in get_args(OnMiss):
        raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
