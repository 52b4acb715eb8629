"""What connectors make of one call: its options, turns of a chat, pieces off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from samkv_integrations.decode import check_stop
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model import Sampling

GENERATE_KWARGS = (
    "do_sample", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p",
)  # fmt: skip
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")

# Options of transformers' generate that are wanted elsewhere, or not at all -> what to do instead.
_INSTEAD = {
    "max_new_tokens": "give max_new_tokens to the LLM, or to a call",
    "max_length": "it would count the prompt as well; give max_new_tokens",
    "eos_token_id": "give stopping_ids to the LLM; the model's own are known",
    "pad_token_id": "one prompt at a time is never padded; leave it out",
}

_Piece = TypeVar("_Piece", covariant=True)


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that were given (None is as good as nothing), if all are known and in range."""
    options = _known("option in generate_kwargs", given, GENERATE_KWARGS)
    sampling = to_options({}, options, max_new_tokens)
    check_stop(sampling.pop("stop", ()))
    Sampling(**sampling)  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    """Keyword arguments of the engine: those of one call, over those of the LLM.

    ``do_sample`` becomes a temperature: without one it is 0 for False and 1 for True.
    """
    own = _known("option of a call", given, CALL_KWARGS)
    options = {**defaults, **own}
    if "temperature" in own and "do_sample" not in own:
        options.pop("do_sample", None)  # a call that gives a temperature wants that
    match options.pop("do_sample", None):
        case None:
            pass
        case False:
            options["temperature"] = 0.0
        case True if options.setdefault("temperature", 1.0) == 0:
            raise InvalidOption("do_sample=True and temperature=0 contradict; leave out either")
        case True:
            pass
        case other:
            raise InvalidOption(f"do_sample={other!r}; it must be True or False")
    lengths = [options.pop(name) for name in ("max_tokens", "max_new_tokens") if name in options]
    if len(lengths) > 1:
        raise InvalidOption("max_tokens and max_new_tokens are the same thing; give one")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return {**options, "max_new_tokens": lengths[0] if lengths else max_new_tokens}


def _known(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name in known:
            continue
        if instead := _INSTEAD.get(name):
            raise UnknownOption(f"{name!r} is no {kind}: {instead}")
        raise UnknownOption.among(kind, name, known)
    return {name: value for name, value in given.items() if value is not None}


def merged(turns: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """(role, content) for a chat template. Neighbours of one role become one: most want turns."""
    found: list[dict[str, str]] = []
    for role, content in turns:
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{content}"
        else:
            found.append({"role": role, "content": content})
    return found


def count_tokens(engine: Engine, text: str) -> int:
    """Tokens of a piece of a prompt, handles at the length of their chunks, without BOS.

    Raises HandleError where a handle was cut in two.
    """
    if not text:
        return 0
    return engine.count_tokens(text) - int(engine.model.bos_id is not None)  # the engine's own


class Pieces(Iterator[_Piece], Protocol[_Piece]):
    """What comes piece by piece, and can be ended before it is exhausted."""

    def close(self) -> None:
        """End it and free what it holds."""
        ...


async def off_loop(pieces: Pieces[_Piece]) -> AsyncGenerator[_Piece]:
    """Iterate in threads, so that the event loop is free while a piece is computed.

    However this ends, ``pieces`` is closed. A task that is cancelled waits for the piece under way,
    which nothing can interrupt; after it nothing is computed any more.
    """
    turn = threading.Lock()

    def step() -> _Piece | None:
        with turn:
            return next(pieces, None)

    def close() -> None:
        with turn:
            pieces.close()

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        await asyncio.shield(asyncio.to_thread(close))
