"""``samkv bench serve``."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer
from tqdm.auto import tqdm

from samkv_integrations import figures
from samkv_integrations.bench import intervals, load_plot
from samkv_integrations.bench.grid import check_folder
from samkv_integrations.bench.journal import Journal
from samkv_integrations.bench.load import Client, Endpoint, Record, require_httpx
from samkv_integrations.bench.load_prompts import Prompts
from samkv_integrations.bench.load_run import AS_SERVED, Block, LoadConfig, Pace, run
from samkv_integrations.bench.load_subject import Prepared, Subject
from samkv_integrations.bench.load_summary import rows_of
from samkv_integrations.bench.run_settings import machine
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import comma_lists as lists
from samkv_integrations.cli import tables
from samkv_integrations.cli.bench_load_table import load_lines, load_table
from samkv_integrations.cli.bench_server import serving
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import get_method

Keep = Callable[[Pace, Record], None]

_OWN_SERVER = "http://127.0.0.1/v1"
"""Stands for the server that is started here, whose port is known when it runs."""


def serve(
    url: args.Url = None, model: args.ServedModel = None, shape: args.ServedShape = None,
    layers: args.Layers = None, dtype: args.Dtype = "auto", device: args.Device = "auto",
    questions: args.ServedQuestions = None, chunks: args.PromptChunks = None,
    chunk_tokens: args.PromptChunkTokens = None, warm_share: args.WarmShare = None,
    chat: args.Chat = False, methods: args.AllMethods = "auto,recompute",
    concurrency: args.Concurrency = "", rate: args.Rate = "", requests: args.Requests = 32,
    rounds: args.Rounds = 2, max_tokens: args.MaxNewTokens = 16,
    timeout: args.RequestSeconds = 600.0, api_key: args.ApiKey = None,
    folder: args.BenchFolder = None, output: args.LoadFolder = None, fresh: args.Fresh = False,
    as_json: args.Json = False, plot: args.LoadPlot = None,
) -> None:  # fmt: skip
    """Throughput and latencies of a server under load, methods side by side."""
    subject = Subject(
        url=url, model=model, shape=shape, layers=layers, dtype=dtype, device=device,
        questions=questions, n_chunks=chunks, chunk_tokens=chunk_tokens, warm_share=warm_share,
        chat=chat,
    )  # fmt: skip
    config = LoadConfig(
        labels=tuple(get_method(name).name for name in lists.method_names(methods)),
        paces=_paces(concurrency, rate), requests=requests, rounds=rounds,
    )  # fmt: skip
    endpoint = Endpoint(
        url=url or _OWN_SERVER, model=model if url else None, max_tokens=max_tokens,
        timeout_s=timeout, api_key=api_key,
    )  # fmt: skip
    _check_surroundings(folder, plot)
    use_threads_for(subject.name)
    settings = _settings(subject, config, endpoint)
    with (
        _journal(output, settings, fresh=fresh) as keep,
        _target(subject, endpoint, config, folder) as (found, made),
    ):
        name, blocks = asyncio.run(_measured(found, config, made.prompts, keep))
    rows, name = rows_of(blocks), name if url else made.name
    if plot:
        load_plot.draw(blocks, rows, plot, name)
    if as_json:
        more = {"hardware": settings["hardware"], "settings": settings}
        typer.echo(figures.to_json("bench serve", name, rows, more))
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
        return tuple(Pace(rate=each) for each in lists.shares("--rate", rate))
    counts = lists.counts("--concurrency", concurrency or "8")
    return tuple(Pace(concurrency=each) for each in counts)


def _check_surroundings(folder: Path | None, plot: Path | None) -> None:
    """Raise before anything is measured if the figures could not be taken or written afterwards."""
    require_httpx()
    intervals.require_extras()
    check_folder(folder)
    if plot:
        load_plot.check(plot)


def _settings(subject: Subject, config: LoadConfig, endpoint: Endpoint) -> dict[str, Any]:
    """All that a run depends on, but no key; and the machine that the requests come from."""
    return {
        **asdict(subject), **asdict(config), "max_tokens": endpoint.max_tokens,
        "timeout_s": endpoint.timeout_s, "version": figures.version(),
        "commit": figures.commit(), "hardware": machine(),
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
