"""Requests to an OpenAI-compatible endpoint, sent as many clients send them, and what each took."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.formatting import Row

if TYPE_CHECKING:
    import httpx

Prompt = str | list[dict[str, str]]
"""A text for ``/completions``, or messages for ``/chat/completions``."""

CONNECTION, TIMEOUT, CUT, STREAM, MALFORMED = (
    "connection", "timeout", "cut", "stream", "malformed",
)  # fmt: skip
"""Kinds of errors beside the HTTP statuses: no connection, no end within the time that a request
may take, a stream that ended before its ``[DONE]``, one that reported an error, and data that is
not what the protocol asks for."""

_TEXTS_A_REQUEST = 8
"""Chunks that one request has cached: a pass of some seconds, far below any limit of a body."""

_MESSAGE_LENGTH = 300
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of one request.

    label, index: what answered, and to which prompt of the run. error: None if it was answered to
    its end, else the HTTP status as text or one of the kinds above; message: what the server or
    the client said about it.
    ttft_s: seconds from when the request was due to the first text of its answer; None without
    text. gaps_s: between each text of the stream and the next. total_s: to the end of the stream.
    prompt_tokens, cached_tokens, completion_tokens: as the server counted them; without its count
    completion_tokens is the number of texts. report: what a server of this package adds.
    """

    label: str
    index: int
    error: str | None = None
    message: str = ""
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    total_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    report: Row | None = None

    @property
    def token_s(self) -> float | None:
        """Seconds of an output token after the first, mean over the answer."""
        if self.completion_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go and what all of them ask for.

    url: up to and with ``/v1``. model: its name; None until `Client.pick_model` asked for it.
    timeout_s: that a request may take. api_key: a bearer token, if the server wants one.
    """

    url: str
    model: str | None = None
    max_tokens: int = 16
    timeout_s: float = 600.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port that is none
            is_one = False
        if not is_one:
            raise InvalidOption(f"url {self.url!r}; give one such as http://127.0.0.1:8000/v1")
        if self.max_tokens < 1:
            raise InvalidOption(f"max_tokens={self.max_tokens}; it must be at least 1")
        if not self.timeout_s > 0:
            raise InvalidOption(f"timeout={self.timeout_s}; it must be above 0 seconds")


class Client:
    """Sends requests to an endpoint, as many at a time as it is asked to.

    Raises MissingExtra without httpx.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        require_httpx()
        import httpx

        self.endpoint = endpoint
        self.model = endpoint.model
        key = endpoint.api_key
        self._http = httpx.AsyncClient(
            base_url=endpoint.url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # no request may wait for another's connection: the server's queue is what is measured
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(endpoint.timeout_s),
            # a proxy cannot reach this machine's own servers
            trust_env=urlsplit(endpoint.url).hostname not in _LOOPBACK,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def pick_model(self) -> str:
        """The name of the model that is asked: the one given, or the first that the server names.

        Raises InvalidOption if no server answers, or if it names none.
        """
        if self.model is None:
            found = await self._call("GET", "models")
            try:
                self.model = str(found.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise InvalidOption(
                    f"{self.endpoint.url}/models names no model ({found.status_code}: "
                    f"{_said(found.text)}); give its name with --model"
                ) from error
        return self.model

    async def has_chunks(self) -> bool:
        """Whether the server is one of this package, which caches chunks.

        Raises InvalidOption if it does not answer, or lets nobody ask without a key.
        """
        answer = await self._call("GET", "samkv/chunks")
        if answer.status_code in (404, 405):
            return False
        self._refuse_failed(answer)
        return True

    async def cache_chunks(self, texts: Sequence[str]) -> None:
        """Have the server cache chunks. Raises InvalidOption if it does not."""
        for at in range(0, len(texts), _TEXTS_A_REQUEST):
            body = {"texts": list(texts[at : at + _TEXTS_A_REQUEST])}
            self._refuse_failed(await self._call("POST", "samkv/chunks", body))

    def _refuse_failed(self, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            raise InvalidOption(
                f"{answer.request.method} {answer.url} failed ({answer.status_code}: "
                f"{_said(answer.text)}); mend that, and start again"
            )

    async def _call(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        import httpx

        try:
            return await self._http.request(verb, path, json=body)
        except httpx.HTTPError as error:
            raise InvalidOption(
                f"no server answers at {self.endpoint.url} ({_reason(error)}); start one with "
                "'samkv serve', or leave --url out"
            ) from error

    async def ask(
        self,
        prompt: Prompt,
        *,
        label: str,
        index: int,
        method: str | None = None,
        due: float | None = None,
    ) -> Record:
        """Send one prompt and read its answer. Never raises for what a server does.

        method: named in the request; None for an endpoint that knows none. due: the moment of
        `time.perf_counter` from which its times count; None for now.
        """
        import httpx

        began = time.perf_counter() if due is None else due
        reading = _Reading()
        error: tuple[str, str] | None = None
        try:
            # the limit of httpx is one on silence, and a stream may trickle
            async with asyncio.timeout(self.endpoint.timeout_s):
                error = await self._read(self._body(prompt, method), reading)
        except (TimeoutError, httpx.TimeoutException) as cause:
            error = TIMEOUT, _reason(cause)
        except httpx.ConnectError as cause:
            error = CONNECTION, _reason(cause)
        except httpx.HTTPError as cause:
            error = CUT, _reason(cause)
        except (ValueError, LookupError, TypeError, AttributeError) as cause:
            error = MALFORMED, _reason(cause)
        kind, message = error or (None, "")
        return reading.record(
            label=label, index=index, error=kind, message=message, began=began
        )  # fmt: skip

    async def _read(self, body: Mapping[str, Any], reading: _Reading) -> tuple[str, str] | None:
        """Read the stream of an answer; returns kind and message of what went wrong."""
        path = "chat/completions" if "messages" in body else "completions"
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return str(response.status_code), _said(text)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return None
                found = json.loads(data)
                if "error" in found:
                    return STREAM, _said(data)
                reading.take(found)
        return CUT, "the stream ended before its [DONE]"

    def _body(self, prompt: Prompt, method: str | None) -> dict[str, Any]:
        field = "prompt" if isinstance(prompt, str) else "messages"
        body: dict[str, Any] = {
            "model": self.model, field: prompt, "max_tokens": self.endpoint.max_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return body if method is None else {**body, "samkv": {"method": method}}


class _Reading:
    """What has come of a stream so far."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._report: Row | None = None

    def take(self, part: Mapping[str, Any]) -> None:
        """Take in one event of the stream."""
        for choice in part.get("choices") or ():
            if (choice.get("delta") or {}).get("content") or choice.get("text"):
                self._moments.append(time.perf_counter())
        self._usage = part.get("usage") or self._usage
        self._report = part.get("samkv") or self._report

    def record(
        self, *, label: str, index: int, error: str | None, message: str, began: float
    ) -> Record:
        """What became of the request, which ends now."""
        ended, moments = time.perf_counter(), self._moments
        details = self._usage.get("prompt_tokens_details") or {}
        return Record(
            label=label, index=index, error=error, message=message,
            ttft_s=moments[0] - began if moments else None,
            gaps_s=tuple(b - a for a, b in zip(moments, moments[1:], strict=False)),
            total_s=ended - began,
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=self._usage.get("completion_tokens", len(moments)),
            report=self._report,
        )  # fmt: skip


Send = Callable[[float | None], Awaitable[Record]]
"""Sends a request that is due at a moment, None for now."""


async def closed_loop(sends: Sequence[Send], n_clients: int) -> list[Record]:
    """So many clients, each of which sends its next request when its last one is answered."""
    waiting = iter(sends)

    async def client() -> list[Record]:
        return [await send(None) for send in waiting]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client()) for _ in range(n_clients)]
    return [record for task in tasks for record in task.result()]


async def open_loop(sends: Sequence[Send], delays_s: Sequence[float]) -> list[Record]:
    """Each request after its delay, in seconds from now, however many are under way by then."""
    began = time.perf_counter()

    async def at(delay_s: float, send: Send) -> Record:
        due = began + delay_s
        await asyncio.sleep(due - time.perf_counter())
        # due, not now: what a busy client adds would otherwise be left out of just the slow ones
        return await send(due)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at(*one)) for one in zip(delays_s, sends, strict=True)]
    return [task.result() for task in tasks]


def arrivals(rate: float, n_requests: int, seed: int) -> list[float]:
    """When the requests of a Poisson process arrive, in seconds: ``rate`` a second on average."""
    return list(_arrivals(rate, n_requests, random.Random(seed)))


def _arrivals(rate: float, n_requests: int, rng: random.Random) -> Iterator[float]:
    moment = 0.0
    for _ in range(n_requests):
        moment += rng.expovariate(rate)
        yield moment


def require_httpx() -> None:
    """Raise MissingExtra if httpx is not installed."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise MissingExtra.of("httpx", "bench") from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH].rstrip(": ")


def _said(text: str) -> str:
    """What an error says, whether or not it has OpenAI's form."""
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        pass
    return " ".join(str(text).split())[:_MESSAGE_LENGTH]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run, the same for each label but for chunks that nobody may have cached.

    cached: the chunks that are cached beforehand. by_label: one list of the same length each.
    """

    cached: tuple[str, ...]
    by_label: dict[str, list[Prompt]]


AS_SERVED = "as-served"
"""Label of an endpoint that knows no methods."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How requests come: from so many clients that wait for answers, or so many a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None)
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidOption(f"concurrency={self.concurrency}; it must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidOption(f"rate={self.rate:g}; it must be above 0 requests a second")

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.concurrency is None else f"{self.concurrency} clients"


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent. labels: methods, or `AS_SERVED` alone.

    requests: of each label at each pace, in so many ``rounds``. seed: of the arrivals.

    Raises InvalidOption for what cannot be sent.
    """

    labels: tuple[str, ...]
    paces: tuple[Pace, ...]
    requests: int = 32
    rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise InvalidOption(f"methods {', '.join(self.labels)!r}; name each once, at least one")
        if not self.paces:
            raise InvalidOption("no pace is given; give --concurrency 8, or --rate 2")
        if self.rounds < 1:
            raise InvalidOption(f"rounds={self.rounds}; it must be at least 1")
        least = max(pace.concurrency or 1 for pace in self.paces) * self.rounds
        if self.requests < least:
            raise InvalidOption(
                f"requests={self.requests} in rounds={self.rounds}; so many clients are only busy "
                f"with {least} requests or more"
            )

    @property
    def n_prompts(self) -> int:
        """Prompts of a label: those of each pace, and one to warm up."""
        return len(self.paces) * self.requests + 1

    def indices(self, n_pace: int, n_round: int) -> range:
        """The prompts of a round of a pace; the first one of all warms up."""
        first = 1 + n_pace * self.requests
        begin, end = (self.requests * n // self.rounds for n in (n_round, n_round + 1))
        return range(first + begin, first + end)


@dataclass(frozen=True, kw_only=True)
class Block:
    """The requests of one label in one round, sent while no others were. duration_s: of all."""

    label: str
    pace: Pace
    round: int
    duration_s: float
    records: tuple[Record, ...]


async def run(
    config: LoadConfig,
    client: Client,
    prompts: Prompts,
    on_record: Callable[[Pace, Record], None] = lambda pace, record: None,
) -> list[Block]:
    """Send everything, and return it in the order in which it was sent.

    Each label has the endpoint to itself for a block of requests, then the next one sends the same
    prompts at the same pace; every second round goes through the labels backwards, so that a
    machine that gets slower or faster does so for all. One request of each label before all
    others does not count.

    Raises InvalidOption if one of those is not answered, as then no other would be.
    """
    for label in config.labels:
        first = await _send(client, prompts, label, 0, None)
        if first.error:
            raise InvalidOption(
                f"the first request to {client.endpoint.url} ({label}) was not answered "
                f"({first.error}: {first.message}); mend that, and start again"
            )
    blocks = []
    for n_pace, pace in enumerate(config.paces):
        for n_round in range(config.rounds):
            for label in config.labels[:: -1 if n_round % 2 else 1]:
                sends = [
                    _reported(partial(_send, client, prompts, label, index), pace, on_record)
                    for index in config.indices(n_pace, n_round)
                ]
                began = time.perf_counter()
                records = await _at(pace, sends, config.seed + n_round)
                blocks.append(Block(
                    label=label, pace=pace, round=n_round, records=tuple(records),
                    duration_s=time.perf_counter() - began,
                ))  # fmt: skip
    return blocks


async def _at(pace: Pace, sends: Sequence[Send], seed: int) -> list[Record]:
    if pace.concurrency is not None:
        return await closed_loop(sends, pace.concurrency)
    assert pace.rate is not None
    return await open_loop(sends, arrivals(pace.rate, len(sends), seed))


async def _send(
    client: Client, prompts: Prompts, label: str, index: int, due: float | None
) -> Record:
    method = None if label == AS_SERVED else label
    prompt = prompts.by_label[label][index]
    return await client.ask(prompt, label=label, index=index, method=method, due=due)


def _reported(send: Send, pace: Pace, on_record: Callable[[Pace, Record], None]) -> Send:
    async def sent(due: float | None) -> Record:
        record = await send(due)
        on_record(pace, record)
        return record

    return sent
