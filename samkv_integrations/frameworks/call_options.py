"""The options of one call of a framework, as the arguments of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.model.sampling import OPTIONS, Sampling

GENERATE_KWARGS = tuple(sorted({"do_sample", "stop", "timeout", *OPTIONS} - {"max_new_tokens"}))
CALL_KWARGS = (*GENERATE_KWARGS, "max_tokens", "max_new_tokens")
ONE_CALL_KWARGS = (*CALL_KWARGS, "json_schema")
"""Those, and what is never an option of all calls."""
DEFAULT_MAX_NEW_TOKENS = Sampling().max_new_tokens

WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "return_full_text": (False, "an answer never repeats its prompt"),
        "skip_prompt": (True, "an answer never repeats its prompt"),
        "skip_special_tokens": (True, "an answer holds none"),
        "num_return_sequences": (1, "a prompt has one answer"),
        "num_beams": (1, "there is no beam search"),
        "use_cache": (True, "an answer always goes on from its KV entries"),
    }
)
"""Options of transformers' generate, pipelines and streamers -> the value that they have here in
any case, and is accepted therefore; and why there is no other."""

ANY_VALUE = ("pad_token_id",)
"""Those that mean nothing here: one prompt at a time is never padded."""

# Options of transformers' generate that are wanted elsewhere, or not at all -> what to do instead.
_INSTEAD = {
    "max_new_tokens": "give max_new_tokens to the LLM, or to a call",
    "max_length": "it would count the prompt as well; give max_new_tokens",
    "eos_token_id": "give stopping_ids to the LLM; the model's own are known",
}


def checked_generate_kwargs(given: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """The options that were given (None is as good as nothing), if all are known and in range."""
    options = known_options("option in generate_kwargs", given, GENERATE_KWARGS)
    AnswerSettings.of(**to_options({}, options, max_new_tokens))  # raises if one is out of range
    return options


def to_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    """Keyword arguments of the engine: those of one call, over those of the LLM.

    ``do_sample`` becomes a temperature: without one it is 0 for False and 1 for True.
    """
    own = known_options("option of a call", given, ONE_CALL_KWARGS)
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


def known_options(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """What was given, without Nones and without what changes nothing here.

    Raises:
        UnknownOption: one is none of ``known``; kind: what it should have been, in words.
        InvalidOption: one of `WITHOUT_EFFECT` would have an effect.
    """
    found = {}
    for name, value in given.items():
        if name in known:
            found[name] = value
        elif name in WITHOUT_EFFECT:
            allowed, why = WITHOUT_EFFECT[name]
            if value is not None and value != allowed:
                raise InvalidOption(f"{name}={value!r}; {why}, leave it out or give {allowed}")
        elif instead := _INSTEAD.get(name):
            raise UnknownOption(f"{name!r} is no {kind}: {instead}")
        elif name not in ANY_VALUE:
            raise UnknownOption.among(kind, name, known)
    return {name: value for name, value in found.items() if value is not None}
