"""What caching chunks costs, in plain forwards of transformers over the same texts."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks import models
from benchmarks import options as own
from benchmarks.commands import command_line, counts, loaded_model, time_table
from benchmarks.latency import check_counts, check_folder
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.formatting import Row, to_json
from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.passes.prefill import (
    BATCH_TOKENS,
    DEVICE_BATCH_TOKENS,
)
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore


def batches_of(model: Model, texts: Sequence[str]) -> list[list[str]]:
    """The texts sorted by length, in batches of as many tokens as one of an ingest, padded."""
    counted = sorted((len(model.tokenize(text, special=False)), text) for text in texts)
    most = BATCH_TOKENS if model.device.type == "cpu" else DEVICE_BATCH_TOKENS
    batches: list[list[str]] = []
    for length, text in counted:
        if not batches or length * (len(batches[-1]) + 1) > most:
            batches.append([])
        batches[-1].append(text)
    return batches


def padded(model: Model, texts: Sequence[str]) -> dict[str, Tensor]:
    """Inputs of a forward of transformers."""
    ids = [model.tokenize(text, special=False) for text in texts]
    longest = max(map(len, ids))
    return {
        "input_ids": torch.tensor([one + [0] * (longest - len(one)) for one in ids]),
        "attention_mask": torch.tensor([
            [1] * len(one) + [0] * (longest - len(one)) for one in ids
        ]),
    }  # fmt: skip


def forward(model: Model, batch: dict[str, Tensor]) -> None:
    """Transformers' own forward of ``batch``, which fills a cache; no logits."""
    with torch.inference_mode():
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        model.hf.get_decoder()(**inputs, use_cache=True)  # type: ignore[no-untyped-call]


def seconds_of(model: Model, call: Callable[[], object]) -> float:
    """Seconds of ``call``: of all threads on a CPU, else until the device is done with it."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    began = clock()
    call()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return clock() - began


def measured(model: Model, texts: Sequence[str], folder: Path, repeats: int) -> Row:
    """Medians over batches, and sums over a round of them.

    After each batch the ways take turns, in random order: a machine that is slower for a while is
    so for all of them. forward_s, ingest_s: seconds of plain forwards, and of caching into a
    folder, of all texts. forwards: seconds of caching a batch into a folder over those of its plain
    forward. in_memory: of caching it into memory, so the rest is files. An engine computes its
    prefix once, in its first batch.
    """
    batches, order = batches_of(model, texts), random.Random(0)
    inputs = [padded(model, batch) for batch in batches]
    Engine(model, MemoryStore()).cache_chunks(batches[0])  # warms up
    seconds: list[list[float]] = []
    for round_ in range(repeats):
        engines = Engine(model, ChunkStore(folder / f"kv{round_}")), Engine(model, MemoryStore())
        for batch, plain in zip(batches, inputs, strict=True):
            caching = (partial(engine.cache_chunks, batch) for engine in engines)
            calls, of_batch = (partial(forward, model, plain), *caching), [0.0] * 3
            for at in order.sample(range(len(calls)), len(calls)):
                of_batch[at] = seconds_of(model, calls[at])
            seconds.append(of_batch)
    return {
        "n_tokens": sum(int(each["attention_mask"].sum()) for each in inputs),
        "forward_s": sum(plain for plain, _, _ in seconds) / repeats,
        "ingest_s": sum(disk for _, disk, _ in seconds) / repeats,
        "forwards": statistics.median(disk / plain for plain, disk, _ in seconds),
        "in_memory": statistics.median(memory / plain for plain, _, memory in seconds),
    }


def texts_of(model: Model, n_chunks: int, chunk_tokens: int, seed: int = 0) -> list[str]:
    """Random words, of half of ``chunk_tokens`` to all of them."""
    words, rng = models.Words(model, seed), random.Random(seed)
    return [words.text(rng.randint(-(-chunk_tokens // 2), chunk_tokens)) for _ in range(n_chunks)]


def ingest(
    model: Annotated[
        str | None, typer.Option(help="GGUF file, folder or 'smollm2', instead of a shape.")
    ] = None,
    shape: own.Shape = "qwen2.5-0.5b", layers: own.Layers = None, dtype: args.Dtype = "auto",
    device: own.ShapeDevice = "cpu", chunks: own.Chunks = "16",
    chunk_tokens: own.ChunkTokens = "256", repeats: own.Repeats = 3,
    folder: own.BenchFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """What caching chunks costs, in plain forwards over the same texts; CPU seconds on a CPU."""
    numbers, lengths = counts("--chunks", chunks), counts("--chunk-tokens", chunk_tokens)
    check_counts("chunks", numbers, 1)
    check_counts("chunk_tokens", lengths, 1)
    check_counts("repeats", [repeats], 1)
    check_folder(folder)
    models.use_threads_for(model or shape)
    if model is not None:
        loaded = loaded_model(model, device, dtype)
    else:
        loaded = models.build(
            shape, layers=layers, dtype=dtype, device=device, seed=0, window=max(lengths) + 512
        )
    rows = list(_rows(loaded, numbers, lengths, repeats, folder))
    if as_json:
        typer.echo(to_json("benchmarks ingest", loaded.name, rows))
        return
    typer.echo(time_table(list(rows[0]), rows))


def _rows(
    model: Model, numbers: Sequence[int], lengths: Sequence[int], repeats: int, place: Path | None
) -> Iterator[Row]:
    for length in lengths:
        texts = texts_of(model, max(numbers), length)
        for n_chunks in numbers:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                found = measured(model, texts[:n_chunks], Path(folder), repeats)
            kind = {"dtype": model.dtype_name, "device": models.device_name(model)}
            yield {"n_chunks": n_chunks, "chunk_tokens": length, **found, **kind}


app = command_line(ingest)
main = app
