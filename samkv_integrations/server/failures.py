"""Errors as OpenAI's API has them: a status, and what is wrong, of which type, with which field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from samkv_integrations.errors import (
    ChunkNotCached,
    InvalidChunk,
    Overloaded,
    PromptTooLong,
    SamkvError,
    StoreError,
    TimedOut,
)

RETRY_AFTER_S = 1
"""What a client is told that comes while too many wait."""

_TOO_LATE = (
    "the answer was not complete within the server's --timeout; ask for fewer tokens, or ask later"
)
_STORE = (
    "the server's store of chunk caches failed; its log says how, under the x-request-id of this "
    "response"
)
_FIELD = re.compile(r"(\w+)=")
_SHOWN = 80

_KINDS: Sequence[tuple[type[SamkvError], int, str, str | None]] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (ChunkNotCached, 400, "invalid_request_error", "chunk_not_cached"),
    (InvalidChunk, 400, "invalid_request_error", "invalid_chunk"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (TimedOut, 504, "timeout_error", "timeout"),
    (StoreError, 500, "server_error", "store_error"),
    (SamkvError, 400, "invalid_request_error", None),
)


@dataclass(kw_only=True, eq=False)  # not frozen: Python writes tracebacks to what is raised
class Failure(Exception):
    """Why a request is not answered.

    status: of HTTP. type, code, param: as OpenAI's errors have them; param is the field of the
    request that is wrong. more: what the body says beside the error. cause: what the log says of
    it; the client is not told, as it names folders of the server.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    cause: str | None = None

    @classmethod
    def of(cls, error: SamkvError) -> Failure:
        """An error of ours: its message is made for the user, but for those of the store."""
        status, kind, code = next(
            (status, kind, code) for of, status, kind, code in _KINDS if isinstance(error, of)
        )
        if isinstance(error, StoreError):
            return cls(status=status, message=_STORE, type=kind, code=code, cause=str(error))
        message = _TOO_LATE if isinstance(error, TimedOut) else str(error)
        named = _FIELD.match(message)
        param = named[1] if named and status == 400 else None
        if param is not None and code is None:
            code = "invalid_value"
        return cls(status=status, message=message, type=kind, code=code, param=param)

    @classmethod
    def of_body(cls, errors: Sequence[Any]) -> Failure:
        """What a body is refused for: the first of pydantic's errors."""
        error = errors[0]
        where = [str(part) for part in error["loc"] if part != "body"]
        param = ".".join(where)[:_SHOWN] or None
        match error["type"]:
            case "json_invalid":
                return cls(status=400, message=f"the body is no JSON: {_cause(error)}")
            case "extra_forbidden":
                message = f"{param!r} is unknown or not supported here; leave it out"
                return cls(status=400, message=message, param=param, code="unsupported_parameter")
            case "missing":
                return cls(
                    status=400, message=f"{param or 'the body'} is missing; give it", param=param
                )
        if not where:
            message = (
                f"the body: {error['msg']}; send one JSON object, with the header 'content-type: "
                "application/json'"
            )
            return cls(status=400, message=message, code="invalid_value")
        shown = _shown(error.get("input"))
        message = f"{param}={shown}: {error['msg']}"
        return cls(status=400, message=message, param=param, code="invalid_value")

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, or the last event of a stream."""
        error = {name: getattr(self, name) for name in ("message", "type", "param", "code")}
        return {"error": error, **self.more}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        match self.status:
            case 401:
                return {"www-authenticate": "Bearer"}
            case 429:
                return {"retry-after": str(RETRY_AFTER_S)}
        return {}

    @property
    def response(self) -> JSONResponse:
        """The response to a request that fails so."""
        return JSONResponse(self.body, self.status, self.headers)


def gone() -> Failure:
    """The client is gone: for the metrics alone, as nobody reads it. 499 is nginx's for this."""
    return Failure(status=499, message="the client is gone", code="client_gone")


def _cause(error: Any) -> str:  # noqa: ANN401
    return str(error.get("ctx", {}).get("error", error["msg"]))


def _shown(given: object) -> str:
    """What was given, if it is short enough to be read again."""
    text = repr(given) if isinstance(given, str | int | float | bool | None) else "..."
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
