"""``python -m benchmarks serve``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import typer
from rich.table import Table
from tqdm.auto import tqdm

from benchmarks import options as own
from benchmarks.commands import command_line, counts, method_names, shares
from benchmarks.journal import Journal
from benchmarks.latency import check_folder
from benchmarks.load import (
    AS_SERVED,
    Block,
    Client,
    Endpoint,
    LoadConfig,
    Pace,
    Prompts,
    Record,
    require_httpx,
    run,
)
from benchmarks.load_prompts import Prepared, Subject
from benchmarks.load_summary import rows_of
from benchmarks.run_settings import machine
from samkv_integrations import formatting
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.errors import InvalidOption
from samkv_integrations.formatting import Row, ratio, seconds
from samkv_integrations.methods import get_method

Keep = Callable[[Pace, Record], None]

_OWN_SERVER = "http://127.0.0.1/v1"
"""Stands for the server that is started here, whose port is known when it runs."""


def serve(
    url: own.Url = None, model: own.ServedModel = None, shape: own.ServedShape = None,
    layers: own.Layers = None, dtype: args.Dtype = "auto", device: args.Device = "auto",
    questions: own.ServedQuestions = None, chunks: own.PromptChunks = None,
    chunk_tokens: own.PromptChunkTokens = None, warm_share: own.WarmShare = None,
    chat: args.Chat = False, methods: own.AllMethods = "auto,recompute",
    concurrency: own.Concurrency = "", rate: own.Rate = "", requests: own.Requests = 32,
    rounds: own.Rounds = 2, max_tokens: own.NewTokens = 16,
    timeout: own.RequestSeconds = 600.0, api_key: own.ApiKey = None,
    folder: own.BenchFolder = None, output: own.LoadFolder = None, fresh: own.Fresh = False,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Throughput and latencies of a server under load, methods side by side."""
    subject = Subject(
        url=url, model=model, shape=shape, layers=layers, dtype=dtype, device=device,
        questions=questions, n_chunks=chunks, chunk_tokens=chunk_tokens, warm_share=warm_share,
        chat=chat,
    )  # fmt: skip
    config = LoadConfig(
        labels=tuple(get_method(name).name for name in method_names(methods)),
        paces=_paces(concurrency, rate), requests=requests, rounds=rounds,
    )  # fmt: skip
    endpoint = Endpoint(
        url=url or _OWN_SERVER, model=model if url else None, max_tokens=max_tokens,
        timeout_s=timeout, api_key=api_key,
    )  # fmt: skip
    require_httpx()
    check_folder(folder)
    use_threads_for(subject.name)
    settings = _settings(subject, config, endpoint)
    with (
        _journal(output, settings, fresh=fresh) as keep,
        _target(subject, endpoint, config, folder) as (found, made),
    ):
        name, blocks = asyncio.run(_measured(found, config, made.prompts, keep))
    rows, name = rows_of(blocks), name if url else made.name
    if as_json:
        more = {"hardware": settings["hardware"], "settings": settings}
        typer.echo(formatting.to_json("benchmarks serve", name, rows, more))
        return
    out = tables.console()
    out.print(load_table(rows))
    for line in load_lines(rows):
        out.print(line)


def _paces(concurrency: str, rate: str) -> tuple[Pace, ...]:
    if concurrency and rate:
        raise InvalidOption(
            f"--concurrency {concurrency} and --rate {rate}; clients that wait for their answers "
            "send no fixed number a second: give one of them"
        )
    if rate:
        return tuple(Pace(rate=each) for each in shares("--rate", rate))
    return tuple(Pace(concurrency=each) for each in counts("--concurrency", concurrency or "8"))


def _settings(subject: Subject, config: LoadConfig, endpoint: Endpoint) -> dict[str, Any]:
    """All that a run depends on, but no key; and the machine that the requests come from."""
    return {
        **asdict(subject), **asdict(config), "max_tokens": endpoint.max_tokens,
        "timeout_s": endpoint.timeout_s, "version": formatting.version(),
        "commit": formatting.commit(), "hardware": machine(),
    }  # fmt: skip


@contextmanager
def _journal(output: Path | None, settings: dict[str, Any], *, fresh: bool) -> Iterator[Keep]:
    """What keeps each record: in a folder, if one is given."""
    if output is None:
        yield lambda pace, record: None
        return
    with Journal(output, settings, fresh=fresh) as journal:
        if journal.rows:
            raise InvalidOption(
                f"{output} holds such a run already, and a load cannot go on where it was stopped; "
                "name another folder with --output, or drop what it holds with --fresh"
            )

        def keep(pace: Pace, record: Record) -> None:
            journal.add({"id": f"{pace}, prompt {record.index}", "pace": str(pace),
                         **asdict(record)})  # fmt: skip

        yield keep


@contextmanager
def _target(
    subject: Subject, endpoint: Endpoint, config: LoadConfig, folder: Path | None
) -> Iterator[tuple[Endpoint, Prepared]]:
    """Where the requests go: the server that is named, or one that runs as long as this does."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = subject.prepare(
            config.labels, config.n_prompts, endpoint.max_tokens, Path(place) / "model"
        )
        if subject.url is not None:
            yield endpoint, made
            return
        options = (
            "--model", made.served, "--dir", str(Path(place) / "served"),
            "--device", subject.device, "--dtype", subject.dtype,
        )  # fmt: skip
        with serving(options) as url:
            yield replace(endpoint, url=url), made


async def _measured(
    endpoint: Endpoint, config: LoadConfig, prompts: Prompts, keep: Keep
) -> tuple[str, list[Block]]:
    """Have the chunks cached, then send everything; the server's name of the model comes first."""
    async with Client(endpoint) as client:
        name = await client.pick_model()
        if await client.has_chunks():
            await client.cache_chunks(prompts.cached)
        else:
            typer.echo(
                f"{endpoint.url} has no samkv/chunks: it is measured as it is, without chunk "
                f"caches and methods ({AS_SERVED})",
                err=True,
            )
            first = prompts.by_label[config.labels[0]]
            config = replace(config, labels=(AS_SERVED,))
            prompts = replace(prompts, by_label={AS_SERVED: first})
        total = len(config.paces) * config.requests * len(config.labels)
        with tqdm(total=total, desc="asking") as bar:

            def on_record(pace: Pace, record: Record) -> None:
                bar.update()
                keep(pace, record)

            return name, await run(config, client, prompts, on_record)


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
        f"the server ended before it was ready (exit code {server.wait()}): {said}; mend that, or "
        "name a running server with --url"
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


def load_table(rows: Sequence[Row]) -> Table:
    """A row for each label at each pace."""
    columns = (
        "method", "load", "answered", "requests\na second", "tokens\na second", "first\ntoken p50",
        "p90", "p99", "a token\np50", "p99", "of re-\ncompute",
    )  # fmt: skip
    cells = [
        (
            row["label"],
            _load(row),
            f"{row['answered']} of {row['requests']}",
            f"{row['requests_per_s']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            *(_seconds(row[f"ttft_p{p}_s"]) for p in (50, 90, 99)),
            *(_seconds(row[f"token_p{p}_s"]) for p in (50, 99)),
            ratio(row["ttft_ratio"]),
        )
        for row in rows
    ]
    return tables.table(columns, cells, left=2, gap=1)


def load_lines(rows: Sequence[Row]) -> Iterator[str]:
    """What the table has no place for: intervals, what methods came to, queueing, and errors."""
    for row in rows:
        name = f"{row['label']}, {_load(row)}"
        if row["ttft_ratio_low"] is not None and row["ttft_ratio"] != 1:
            yield (
                f"{name}: median first token {row['ttft_ratio']:.3f} of recompute's "
                f"(95 %: {row['ttft_ratio_low']:.3f} to {row['ttft_ratio_high']:.3f})"
            )
        if row["ran"]:
            ways = ", ".join(f"{way} for {n}" for way, n in row["ran"].items())
            yield f"{name}: ran {ways}; waited {_seconds(row['wait_p50_s'])} (median)"
        for kind, n in row["errors"].items():
            yield f"{name}: {n} x {kind} ({row['error_messages'][kind]})"


def _load(row: Row) -> str:
    return str(Pace(concurrency=row["concurrency"], rate=row["rate"]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)


app = command_line(serve)


def main() -> None:
    """Run the benchmark as the command line says."""
    app(prog_name="python -m benchmarks serve")


if __name__ == "__main__":
    main()
