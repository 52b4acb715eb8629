"""The options of one call of a framework, as the arguments of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samkv_integrations.engine.stream import check_stop
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model.sampling import OPTIONS, Sampling

GENERATE_KWARGS = tuple(sorted({"do_sample", "stop", *OPTIONS} - {"max_new_tokens"}))
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")
ONE_CALL_KWARGS = (*CALL_KWARGS, "json_schema")
"""Those, and what is never an option of all calls."""
DEFAULT_MAX_NEW_TOKENS = Sampling().max_new_tokens

# Options of transformers' generate that are wanted elsewhere, or not at all -> what to do instead.
_INSTEAD = {
    "max_new_tokens": "give max_new_tokens to the LLM, or to a call",
    "max_length": "it would count the prompt as well; give max_new_tokens",
    "eos_token_id": "give stopping_ids to the LLM; the model's own are known",
    "pad_token_id": "one prompt at a time is never padded; leave it out",
}


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
    own = _known("option of a call", given, ONE_CALL_KWARGS)
    options = {**defaults, **own}
    if "json_schema" in own and "stop" not in own:
        options.pop("stop", None)  # JSON ends by itself, and what ends other answers would cut it
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
