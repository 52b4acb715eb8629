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
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.store import MemoryStore
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.prefill import BATCH_TOKENS, DEVICE_BATCH_TOKENS
from samkv_integrations.formatting import Row, to_json
from samkv_integrations.model.model import Model


def plain_batches(model: Model, texts: Sequence[str]) -> list[dict[str, Tensor]]:
    """Inputs of transformers' forwards, as a user forms them: sorted by length, padded batches.

    A batch has as many tokens as one of an ingest, padding included.
    """
    ids = sorted((model.tokenize(text, special=False) for text in texts), key=len)
    most = BATCH_TOKENS if model.device.type == "cpu" else DEVICE_BATCH_TOKENS
    grouped: list[list[list[int]]] = []
    for one in ids:
        if not grouped or len(one) * (len(grouped[-1]) + 1) > most:
            grouped.append([])
        grouped[-1].append(one)
    batches = []
    for group in grouped:
        tensors = {"input_ids": group, "attention_mask": [[1] * len(one) for one in group]}
        longest = len(group[-1])
        batches.append({
            name: torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            for name, rows in tensors.items()
        })  # fmt: skip
    return batches


def forward(model: Model, batches: Sequence[dict[str, Tensor]]) -> None:
    """Transformers' own forward of ``batches``, which fills a cache of each; no logits."""
    with torch.inference_mode():
        for batch in batches:
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
    """Medians over rounds in which the ways take turns; one more round warms up.

    forward_s: plain forwards. forwards: seconds of caching into a folder over it, of the same
    round. in_memory: of caching into memory, so the rest is files.
    """
    batches, rounds = plain_batches(model, texts), []
    for round_ in range(repeats + 1):
        engines = Engine(model, ChunkStore(folder / f"kv{round_}")), Engine(model, MemoryStore())
        plain = partial(forward, model, batches)
        rounds.append([
            seconds_of(model, call)
            for call in (plain, *(partial(engine.cache_chunks, texts) for engine in engines))
        ])  # fmt: skip
    of_rounds = rounds[1:] or rounds
    n_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return {
        "n_tokens": n_tokens,
        "forward_s": statistics.median(plain for plain, _, _ in of_rounds),
        "ingest_s": statistics.median(disk for _, disk, _ in of_rounds),
        "forwards": statistics.median(disk / plain for plain, disk, _ in of_rounds),
        "in_memory": statistics.median(memory / plain for plain, _, memory in of_rounds),
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
    use_threads_for(model or shape)
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


def main() -> None:
    """Run the benchmark as the command line says."""
    app(prog_name="python -m benchmarks ingest")


if __name__ == "__main__":
    main()
