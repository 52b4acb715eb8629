"""What caching chunks costs, in plain forwards of transformers over the same texts.

With ``--runtime llama_cpp`` a forward is llama.cpp's decoding of the same tokens, as many texts at
once, by `benchmarks.llama_loop`. The prefix is computed before either is timed.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks import models
from benchmarks import options as own
from benchmarks.answer_grid import Texts
from benchmarks.commands import command_line, counts, loaded_model, show_run
from benchmarks.latency import check_counts, check_folder
from benchmarks.llama_loop import LlamaLoop
from benchmarks.pairs import spread
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.formatting import Row
from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.runtimes.transformers.passes.prefill import (
    BATCH_TOKENS,
    DEVICE_BATCH_TOKENS,
)
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts that are computed at once. forward: computes their entries, and stores none."""

    texts: Sequence[str]
    n_tokens: int
    forward: Callable[[], object]


def forwards_of_loop(model: LlamaCppModel, texts: Sequence[str]) -> list[Batch]:
    """Batches of llama.cpp, decoded by its own loop."""
    chunks, loop = Engine(model, MemoryStore()).chunks, LlamaLoop(model, n_sequences=64)
    loop.begin(chunks.prefix)
    return [
        Batch(
            texts=[ref.text for ref in batch],
            n_tokens=sum(len(ref.token_ids) for ref in batch),
            forward=partial(loop.read, [ref.token_ids for ref in batch]),
        )
        for batch in model.batches(chunks.refer(texts))
    ]  # fmt: skip


def forwards_of_transformers(model: Model, texts: Sequence[str]) -> list[Batch]:
    """Batches of transformers, padded."""
    found = []
    for batch in batches_of(model, texts):
        inputs = padded(model, batch)
        n_tokens = int(inputs["attention_mask"].sum())
        found.append(Batch(texts=batch, n_tokens=n_tokens, forward=partial(forward, model, inputs)))
    return found


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


def seconds_of(model: Runtime, call: Callable[[], object]) -> float:
    """Seconds of ``call``: of all threads on a CPU, else until the device is done with it."""
    is_cuda = model.device_name.startswith("cuda")
    clock = time.perf_counter if is_cuda else time.process_time
    began = clock()
    call()
    if is_cuda:
        torch.cuda.synchronize(model.device_name)
    return clock() - began


def measured(model: Runtime, batches: Sequence[Batch], folder: Path, repeats: int) -> Row:
    """Medians over batches, and sums over a round of them.

    After each batch the ways take turns, in random order: a machine that is slower for a while is
    so for all of them. forward_s, ingest_s: seconds of plain forwards, and of caching into a
    folder, of all texts. forwards: seconds of caching a batch into a folder over those of its plain
    forward. in_memory: of caching it into memory, so the rest is files. An engine of transformers
    computes its prefix once, in its first batch.
    """
    order = random.Random(0)
    Engine(model, MemoryStore()).cache_chunks(batches[0].texts)  # warms up
    seconds: list[list[float]] = []
    for round_ in range(repeats):
        engines = Engine(model, ChunkStore(folder / f"kv{round_}")), Engine(model, MemoryStore())
        for batch in batches:
            caching = (partial(engine.cache_chunks, batch.texts) for engine in engines)
            calls: list[Callable[[], object]] = [batch.forward, *caching]
            of_batch = [0.0] * 3
            for at in order.sample(range(len(calls)), len(calls)):
                of_batch[at] = seconds_of(model, calls[at])
            seconds.append(of_batch)
    return {
        "n_tokens": sum(batch.n_tokens for batch in batches),
        "forward_s": sum(plain for plain, _, _ in seconds) / repeats,
        "ingest_s": sum(disk for _, disk, _ in seconds) / repeats,
        "forwards": str(spread([disk / plain for plain, disk, _ in seconds])),
        "in_memory": str(spread([memory / plain for plain, _, memory in seconds])),
    }


def texts_of(model: Runtime, n_chunks: int, chunk_tokens: int, seed: int = 0) -> list[str]:
    """Paragraphs, of about half of ``chunk_tokens`` to all of them."""
    texts, rng = Texts(model), random.Random(seed)
    return [texts.next(rng.randint(-(-chunk_tokens // 2), chunk_tokens)) for _ in range(n_chunks)]


def ingest(
    model: Annotated[
        str | None, typer.Option(help="GGUF file, folder or 'smollm2', instead of a shape.")
    ] = None,
    runtime: own.OfRuntime = "transformers",
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
    loaded: Any
    if model is not None or runtime == "llama_cpp":
        loaded = loaded_model(model or "smollm2", device, dtype, runtime)
    else:
        loaded = models.build(
            shape, layers=layers, dtype=dtype, device=device, seed=0, window=max(lengths) + 512
        )
    batched = forwards_of_loop if runtime == "llama_cpp" else forwards_of_transformers
    rows = list[Row]()
    for length in lengths:
        texts = texts_of(loaded, max(numbers), length)
        for n_chunks in numbers:
            batches = batched(loaded, texts[:n_chunks])
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found = measured(loaded, batches, Path(place), repeats)
            rows.append({"n_chunks": n_chunks, "chunk_tokens": length, **found})
    show_run(loaded, list(rows[0]), rows, as_json=as_json)


app = command_line(ingest)
main = app
