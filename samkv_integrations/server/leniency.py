"""Fields that a lenient server ignores, and names in a header.

These are the fields that it does not know, and values that steer only how an answer is written. A
field that says what an answer contains, or what it is made from, is refused all the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import Message

from samkv_integrations.server.failures import path_of
from samkv_integrations.server.service import BoundedRoute

HEADER = "x-samkv-ignored"

_STEER = frozenset(
    "presence_penalty frequency_penalty reasoning_effort reasoning.effort verbosity text.verbosity "
    "service_tier stream_options.include_obfuscation".split()
)
"""Known fields of which only the neutral value is supported, and others are ignored."""

_DEMAND = frozenset(
    # where the prompt is, or more of it
    "messages prompt input instructions suffix previous_response_id conversation prompt_embeds "
    "images image_url input_audio audio file file_ids file_data documents function_call "
    "web_search_options chat_template chat_template_kwargs continue_final_message system context "
    "template raw add_generation_prompt add_special_tokens truncate_prompt_tokens lora "
    # what the answer contains
    "functions format response_format text json_schema structured_outputs guided_json guided_regex "
    "guided_choice guided_grammar guided_decoding_backend grammar regex ebnf choices logprobs "
    "top_logprobs prompt_logprobs n_probs echo bad_words allowed_token_ids logits_processors "
    "num_return_sequences include_stop_str_in_output extra_body "
    # where it ends
    "stop_sequences stop_token_ids ignore_eos min_tokens num_predict n_predict max_output_tokens "
    "max_new_tokens max_completion_tokens max_length".split()
)
"""Names of unknown fields that are refused, of OpenAI's API and of other servers'."""

_MOST_ROUNDS = 8  # each finds the wrong fields of one message of a list, and takes a new check
_MOST_SHOWN = 16

_Path = tuple[str | None, ...]  # None: any index of a list


class LenientRoute(BoundedRoute):
    """A route that ignores fields, see this module; the header `HEADER` and the log name them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def lenient(request: Request) -> Response:
            ignored = dict[_Path, None]()
            for _ in range(_MOST_ROUNDS):
                try:
                    response = await handle(request)
                    break
                except RequestValidationError as error:
                    wrong = [each for each in error.errors() if not _is_ignored(each)]
                    if wrong:
                        raise RequestValidationError(wrong, body=error.body) from None
                    paths = dict.fromkeys(_path(each["loc"][1:]) for each in error.errors())
                    _drop(error.body, _tree(paths))
                    ignored |= paths
                    request = _request_of(request, error.body)
                    await asyncio.sleep(0)  # other requests in turn
            else:
                response = await handle(request)
            if ignored:
                response.headers[HEADER] = named = _named(list(ignored))
                _log.info("ignored: %s", named)
            return response

        return lenient


_log = logging.getLogger(__name__)


def _is_ignored(error: Any) -> bool:  # noqa: ANN401
    """Whether the field of an error of pydantic is ignored."""
    where = error["loc"][1:]
    if error["type"] == "extra_forbidden":
        return where[0] != "samkv" and where[-1] not in _DEMAND
    return error["type"] in ("literal_error", "number") and path_of(where) in _STEER


def _path(where: Sequence[str | int]) -> _Path:
    return tuple(None if isinstance(part, int) else part for part in where)


def _tree(paths: Iterable[_Path]) -> dict[str | None, Any]:
    """The paths as nested dicts, empty at their ends."""
    tree = dict[str | None, Any]()
    for path in paths:
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
    return tree


def _drop(body: Any, tree: dict[str | None, Any]) -> None:  # noqa: ANN401
    """Remove the fields at the ends of a tree; each object is visited once."""
    if isinstance(body, list):
        for each in body if None in tree else ():
            _drop(each, tree[None])
    elif isinstance(body, dict):
        for part in body.keys() & tree.keys():  # as long as the shorter one
            if tree[part]:
                _drop(body[part], tree[part])
            else:
                del body[part]


def _request_of(request: Request, body: object) -> Request:
    """The request with another body."""
    sent: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        return sent.pop() if sent else await request.receive()

    return Request(request.scope, receive)


def _named(paths: Sequence[_Path]) -> str:
    """The paths as the value of a header: a client chooses their names."""
    written = (
        "".join("[]" if part is None else f".{part}" for part in path).removeprefix(".")
        for path in paths[:_MOST_SHOWN]
    )
    names = [re.sub(r"[^\w.\[\]-]", "?", name, flags=re.ASCII)[:80] for name in written]
    left = len(paths) - len(names)
    return ", ".join(names + [f"and {left} more"] * (left > 0))
