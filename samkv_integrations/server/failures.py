"""Errors in the form of OpenAI's API: a status, a message, a type, a code and a field."""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from samkv_integrations.errors import (
    MOST_SHOWN,
    ChunkNotCached,
    EmbeddingFailed,
    Given,
    InvalidChunk,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    SamkvError,
    StoreError,
    TimedOut,
    shown,
)

_TOO_LATE = "the answer was not complete within its timeout; ask for fewer tokens, or ask later"
_STORE = (
    "the server's store of chunk caches failed; the server's log has the cause, under the "
    "x-request-id of this response"
)
_EMBEDDING = (
    "the embedding of the collection failed; the server's log has the cause, under the "
    "x-request-id of this response"
)
_LONGEST, _HEAD, _TAIL = 500, 80, 300
"""Most characters of a message; a longer one loses its middle, such as a long value."""
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
_KINDS: Sequence[tuple[type[SamkvError], int, str, str | None]] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (ChunkNotCached, 400, "invalid_request_error", "chunk_not_cached"),
    (InvalidChunk, 400, "invalid_request_error", "invalid_chunk"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (OutOfMemory, 503, "server_error", "out_of_memory"),
    (TimedOut, 504, "timeout_error", "timeout"),
    (StoreError, 500, "server_error", "store_error"),
    (EmbeddingFailed, 502, "server_error", "embedding_failed"),
    (SamkvError, 400, "invalid_request_error", None),
)


NO_PATHS: Mapping[str, str] = {}
_OBJECT = ("model_type", "model_attributes_type", "dict_type")  # pydantic's errors


def path_of(parts: Sequence[object]) -> str:
    """The path of a field of a body, such as ``messages[2].content[0].type``."""
    written = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(written).removeprefix(".")


class Failure(HTTPException):
    """An error response.

    type, code, param: those of OpenAI's errors; param is the wrong field of the request.
    cause: for the log only, as it may name folders of the server.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(status, message)
        if len(message) > _LONGEST:
            message = f"{message[:_HEAD]} ... {message[-_TAIL:]}"
        self.status, self.message, self.cause = status, message, cause
        self.type, self.code, self.param = type, code, param

    @classmethod
    def of(
        cls,
        error: Exception,
        names: tuple[str, str] | None = None,
        paths: Mapping[str, str] = NO_PATHS,
    ) -> Failure:
        """The response to an exception.

        names: the model's own, which may be a path, and clients'. paths: the fields of the request
        that are not named as their options, and under ``messages`` that of the prompt.

        Messages of a `SamkvError` are shown, except the store's and the embedding's. The message of
        an unexpected exception is not even logged, because it may hold a prompt.
        """
        if isinstance(error, Failure):
            return error
        if isinstance(error, RecursionError):
            return cls(400, "the body nests lists and objects too deeply; nest fewer")
        if not isinstance(error, SamkvError):
            where = "".join(traceback.format_tb(error.__traceback__))
            return cls(
                500, "the server failed; its log has the cause, under the x-request-id of this "
                "response", type="server_error", code="internal_error",
                cause=f"{type(error).__name__}\n{where}",
            )  # fmt: skip
        status, kind, code = next(
            (status, kind, code) for of, status, kind, code in _KINDS if isinstance(error, of)
        )
        if isinstance(error, StoreError | EmbeddingFailed):
            said = _STORE if isinstance(error, StoreError) else _EMBEDDING
            return cls(status, said, type=kind, code=code, cause=str(error))

        def as_field(given: Given) -> str:
            return str(Given(paths.get(given.option, given.option), given.value))

        message = _TOO_LATE if isinstance(error, TimedOut) else error.told(as_field)
        if names is not None:
            message = message.replace(repr(names[0]), repr(names[1]))
        option = error.option if status == 400 else None
        param = None if option is None else paths.get(option, option)
        if isinstance(error, PromptTooLong):
            param = paths.get("messages")
        return cls(
            status, message, type=kind, code=code or ("invalid_value" if param else None),
            param=param,
        )  # fmt: skip

    @classmethod
    def of_body(cls, errors: Sequence[Any]) -> Failure:
        """The response to an invalid body. errors: those of pydantic, of which the first counts."""
        error = errors[0]
        given, words, context = error.get("input"), error["msg"], error.get("ctx", {})
        where = list(error["loc"][1:])  # without "body"
        if (field := context.get("field")) is not None:
            where.append(field)
            given = given.get(field) if isinstance(given, dict) else given
        param = path_of(where)[:MOST_SHOWN] or None
        match error["type"]:
            case "json_invalid":
                why = context.get("error", words)
                return cls(400, f"the body must be JSON: {why}")
            case "extra_forbidden" | "too_long" if context.get("max_length", 0) == 0:
                message = f"{param!r} is unknown or not supported here; leave it out"
                return cls(400, message, param=param, code="unsupported_parameter")
            case "missing":
                return cls(400, f"{param or 'the body'} is missing; give it", param=param)
            case "too_short" if where:
                return cls(400, f"{param} is empty; give at least one", param=param)
        if error["type"] in _OBJECT:
            words = "it must be an object"
        if not where:
            if isinstance(given, bytes):
                words = "it must be sent as JSON; send the header 'content-type: application/json'"
            return cls(400, f"the body: {words}", code="invalid_value")
        if error["type"] == "literal_error" and " or " not in (only := context["expected"]):
            words = f"only {only} is supported here"
        is_small = isinstance(given, str | int | float | bool | None)
        value = shown(given) if is_small else reprlib.repr(given)[:MOST_SHOWN]
        return cls(400, f"{param}={value}: {words}", param=param, code="invalid_value")

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, or the last event of a stream."""
        return {"error": {n: getattr(self, n) for n in ("message", "type", "param", "code")}}

    @property
    def response(self) -> JSONResponse:
        """The response to the request."""
        return JSONResponse(self.body, self.status, _HEADERS.get(self.status))
