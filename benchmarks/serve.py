"""A server under load: many clients at once, methods side by side.

python -m benchmarks serve --shape qwen2.5-0.5b --layers 6 --concurrency 8
python -m benchmarks serve --model builtin --questions long --concurrency 1,4,8
python -m benchmarks serve --model FILE.gguf --runtime llama_cpp --concurrency 1,4

With ``--runtime llama_cpp`` the last row is llama.cpp's own loop (`benchmarks.llama_loop`), which
answers the first prompts one after the other, in as many threads, once the server has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import IO, Any

import httpx
import numpy as np
import torch
import typer

from benchmarks import models
from benchmarks import options as own
from benchmarks.commands import (
    TRUTH,
    command_line,
    counts,
    loaded_model,
    method_names,
    time_table,
)
from benchmarks.datasets import load
from benchmarks.first_tokens import LOOP
from benchmarks.latency import check_folder
from benchmarks.llama_loop import LlamaLoop
from benchmarks.run_settings import machine
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import formatting
from samkv_integrations.cli.formatting import Row
from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import get_method
from samkv_integrations.prompt import rag_prompt

COLUMNS = (
    "label", "concurrency", "requests", "answered", "requests_per_s", "output_tokens_per_s",
    "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "token_p50_s", "wait_p50_s", "ttft_ratio",
)  # fmt: skip
QUESTION_TOKENS = 12
EMPTY = "an answer without text"
TEXTS_A_REQUEST = 8
"""Chunks that one request has cached: some seconds of the model's time."""


def serve(
    model: own.ServedModel = models.BUILTIN, runtime: own.OfRuntime = "transformers",
    shape: own.ServedShape = None,
    layers: own.Layers = None, dtype: args.Dtype = "auto", device: args.Device = "auto",
    questions: own.ServedQuestions = "short", chunks: own.PromptChunks = 8,
    chunk_tokens: own.PromptChunkTokens = 512, methods: own.AllMethods = "auto,recompute",
    concurrency: own.Concurrency = "8", requests: own.Requests = 32, rounds: own.Rounds = 2,
    max_tokens: own.NewTokens = 16, timeout: own.RequestSeconds = 600.0,
    folder: own.BenchFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Throughput and latencies of a server under load, methods side by side."""
    check_folder(folder)
    if runtime == "llama_cpp" and shape is not None:
        raise InvalidOption(f"shape={shape!r} with runtime={runtime!r}; give --model FILE.gguf")
    labels = [get_method(name).name for name in method_names(methods)]
    clients = counts("--concurrency", concurrency)
    models.use_threads_for(shape or model)
    n_prompts = 1 + len(clients) * rounds * requests  # the first one warms up
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if shape is None:
            found = load(questions)
            asked = [found[n % len(found)] for n in range(n_prompts)]
            cached = list(dict.fromkeys(text for one in asked for text in one.documents))
            prompts = [rag_prompt(one.question, one.documents) for one in asked]
        else:
            saved = random_weights(shape, layers, dtype, device, chunks * (chunk_tokens + 16) + 512,
                                   Path(place) / "model")  # fmt: skip
            model = str(Path(place) / "model") if shape != models.BUILTIN else shape
            cached, prompts = random_prompts(saved, chunks, chunk_tokens, n_prompts)
        options = ("--model", model, "--dir", str(Path(place) / "served"), "--device", device,
                   "--dtype", dtype, "--runtime", runtime,
                   "--n-threads", str(torch.get_num_threads()))  # fmt: skip
        with serving(options) as url:
            rows = asyncio.run(
                measured(url, cached, prompts, labels, clients, requests, rounds, max_tokens,
                         timeout)
            )  # fmt: skip
    if runtime == "llama_cpp":
        rows.append(of_loop(model, prompts[1 : 1 + requests], max_tokens, rows))
    if as_json:
        more = {"hardware": machine(), "commit": formatting.commit()}
        typer.echo(formatting.to_json("benchmarks serve", shape or model, rows, more))
        return
    typer.echo(time_table(COLUMNS, rows))
    for row in rows:
        typer.echo(f"{row['label']}, {row['concurrency']} clients: ran {row['ran']}; "
                   f"errors {row['errors'] or 'none'}")  # fmt: skip


def of_loop(model: str, prompts: Sequence[Any], max_tokens: int, rows: Sequence[Row]) -> Row:
    """The row of llama.cpp's own loop, which reads each prompt from its beginning."""
    loaded = loaded_model(model, "auto", "auto", "llama_cpp")
    loop, outcomes, began = LlamaLoop(loaded), list[Row](), time.perf_counter()
    for prompt in prompts:
        asked, moments = time.perf_counter(), list[float]()
        for _ in islice(loop.tokens(loaded.tokenize(prompt, special=False)), max_tokens):
            moments.append(time.perf_counter())
        n_later = len(moments) - 1
        outcomes.append({
            "error": None, "ttft_s": moments[0] - asked, "wait_s": 0.0, "ran": "llama.cpp",
            "token_s": (moments[-1] - moments[0]) / n_later if n_later else None,
            "completion_tokens": len(moments), "prompt_tokens": None, "cached_tokens": None,
        })  # fmt: skip
    seconds = {LOOP: time.perf_counter() - began}
    (row,) = rows_of({LOOP: outcomes}, seconds, 1)
    full = [each["ttft_p50_s"] for each in rows if each["label"] == TRUTH]
    return row | {"ttft_ratio": row["ttft_p50_s"] / full[0] if full and full[0] else None}


def random_weights(
    shape: str, layers: int | None, dtype: str, device: str, window: int, folder: Path
) -> models.Model:
    """A model of this shape, written to ``folder`` unless it is the built-in one."""
    made = models.build(shape, layers=layers, dtype=dtype, device=device, seed=0, window=window)
    return made if shape == models.BUILTIN else models.save(made, folder)


def random_prompts(
    model: models.Model, n_chunks: int, chunk_tokens: int, n_prompts: int
) -> tuple[list[str], list[str]]:
    """Chunks of random words, and prompts of some of them in random order."""
    words, dice = models.Words(model, 0), random.Random(0)
    pool = [words.text(chunk_tokens) for _ in range(2 * n_chunks)]
    return pool, [
        rag_prompt(words.text(QUESTION_TOKENS) + "?", dice.sample(pool, n_chunks))
        for _ in range(n_prompts)
    ]


async def measured(
    url: str, cached: Sequence[str], prompts: Sequence[str], labels: Sequence[str],
    clients: Sequence[int], requests: int, rounds: int, max_tokens: int, timeout_s: float,
) -> list[Row]:  # fmt: skip
    """Send all prompts with each method; a row for each method at each number of clients.

    In each round a method has the server to itself, and every second round goes through the
    methods backwards, so that a machine that gets slower or faster does so for all.
    """
    limits = httpx.Limits(max_connections=None)  # the server's queue is what is measured
    async with httpx.AsyncClient(
        base_url=f"{url}/", timeout=timeout_s, limits=limits, trust_env=False
    ) as http:
        for at in range(0, len(cached), TEXTS_A_REQUEST):
            body = {"texts": list(cached[at : at + TEXTS_A_REQUEST])}
            (await http.post("samkv/chunks", json=body)).raise_for_status()
        name = (await http.get("models")).json()["data"][0]["id"]
        numbers = iter(range(len(prompts) * len(labels)))

        async def send(prompt: str, label: str) -> Row:
            # a number of its own, or the method that asks second would go on from held memory
            body = {"model": name, "prompt": f"Request {next(numbers):06d}.\n\n{prompt}",
                    "max_tokens": max_tokens, "samkv": {"method": label}}  # fmt: skip
            return await ask(http, body)

        for label in labels:
            await send(prompts[0], label)
        waiting, rows = iter(prompts[1:]), []
        for n_clients in clients:
            outcomes: dict[str, list[Row]] = {label: [] for label in labels}
            seconds: Counter[str] = Counter()
            for number in range(rounds):
                now = [next(waiting) for _ in range(requests)]
                for label in labels[:: -1 if number % 2 else 1]:
                    began = time.perf_counter()
                    todo = iter(now)

                    async def client(label: str = label, todo: Iterator[str] = todo) -> list[Row]:
                        return [await send(prompt, label) for prompt in todo]

                    each = await asyncio.gather(*(client() for _ in range(n_clients)))
                    outcomes[label] += [outcome for some in each for outcome in some]
                    seconds[label] += time.perf_counter() - began
            rows += rows_of(outcomes, seconds, n_clients)
        return rows


async def ask(
    http: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Row:
    """One request, streamed; what it took, or why it has no complete answer (``error``)."""
    body = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    began, moments, usage, report, text = time.perf_counter(), [], {}, {}, ""
    try:
        async with http.stream("POST", "completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                return {"error": f"{response.status_code} {(await response.aread())[:300]!r}"}
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    break
                part = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if "error" in part:
                    return {"error": str(part["error"])}
                if new := "".join(one.get("text", "") for one in part.get("choices") or ()):
                    moments.append(time.perf_counter())
                    text += new
                usage, report = part.get("usage") or usage, part.get("samkv") or report
            else:
                return {"error": "the stream ended before its [DONE]"}
    except httpx.HTTPError as error:
        return {"error": f"{type(error).__name__} {error}"}
    if not moments:
        return {"error": EMPTY}
    n_later = usage["completion_tokens"] - 1
    return {
        "error": None, "text": text, "report": report,
        "ttft_s": moments[0] - began, "wait_s": report["wait_s"],
        "token_s": (moments[-1] - moments[0]) / n_later if n_later else None,
        "ran": report["ran"], "completion_tokens": usage["completion_tokens"],
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }  # fmt: skip


def rows_of(
    outcomes: Mapping[str, Sequence[Row]], seconds: Mapping[str, float], n_clients: int
) -> list[Row]:
    """A row for each method. Times are of complete answers; a second is of the method's turns.

    ttft_ratio: the median first token over that of `recompute` for the same prompts.
    """
    good = {name: [one for one in some if not one["error"]] for name, some in outcomes.items()}
    full = percentile(good.get(TRUTH, ()), "ttft_s", 50)
    rows: list[Row] = []
    for label, some in outcomes.items():
        answered = good[label]
        n_tokens = sum(one["completion_tokens"] for one in answered)
        row: dict[str, Any] = {
            "label": label, "concurrency": n_clients, "requests": len(some),
            "answered": len(answered), "requests_per_s": len(answered) / seconds[label],
            "output_tokens_per_s": n_tokens / seconds[label],
            "errors": dict(Counter(one["error"] for one in some if one["error"])),
            "ran": dict(Counter(one["ran"] for one in answered)),
            "prompt_tokens": percentile(answered, "prompt_tokens", 50),
            "cached_tokens": percentile(answered, "cached_tokens", 50),
        }  # fmt: skip
        for name in ("ttft", "token", "wait"):
            row |= {f"{name}_p{p}_s": percentile(answered, f"{name}_s", p) for p in (50, 90, 99)}
        row["ttft_ratio"] = row["ttft_p50_s"] / full if full and row["ttft_p50_s"] else None
        rows.append(row)
    return rows


def percentile(outcomes: Sequence[Row], name: str, percent: float) -> float | None:
    """A percentile of a figure, linear between its two neighbours; None if nobody has it."""
    values = [one[name] for one in outcomes if one[name] is not None]
    return float(np.percentile(values, percent)) if values else None


STOP_S = 10.0
"""Seconds after which a server that does not stop is killed."""

_READY = re.compile(r"serving .* on (https?://\S+)")
_COMMAND = (sys.executable, "-c", "from samkv_integrations.cli.app import main; main()")
_LAST_LINES = 5


@contextmanager
def serving(options: Sequence[str], command: Sequence[str] = _COMMAND) -> Iterator[str]:
    """A server in a process of its own, on a free port; gives its URL once it is ready.

    options: of ``samkv serve``. command: what is run in place of ``samkv``.

    Raises InvalidOption with the server's last words if it ends before it is ready.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop(KEYS_VARIABLE, None)  # of another server: nobody has a key of this one
    with _ends_on_sigterm():
        server = subprocess.Popen(
            [*command, "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", env=environment,
        )  # fmt: skip
        assert server.stderr is not None
        # a pipe that nobody reads would fill up and stop the server
        reader = threading.Thread(target=deque, args=(server.stderr, 0), daemon=True)
        with server.stderr:
            try:
                url = _ready_url(server, server.stderr)
                reader.start()
                yield url
            finally:
                _stop(server)
                if reader.is_alive():
                    reader.join()


def _ready_url(server: subprocess.Popen[str], lines: IO[str]) -> str:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        if found := _READY.search(line):
            return found[1]
        last.append(line.strip())
    said = " ".join(line for line in last if line) or "it said nothing"
    raise InvalidOption(
        f"the server ended before it was ready (exit code {server.wait()}): {said}; "
        "mend that, and start again"
    )


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process as an exception does, so that what it started is stopped."""
    if threading.current_thread() is not threading.main_thread():  # where no signal comes
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


app = command_line(serve)
main = app
