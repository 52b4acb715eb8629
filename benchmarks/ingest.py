"""How fast chunks are cached, against a plain forward over the same batches of the same texts."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from torch import Tensor

import samkv_integrations
from benchmarks import models
from benchmarks import options as own
from benchmarks.commands import command_line, counts, time_table
from benchmarks.latency import check_counts, check_folder
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.loading import use_threads_for
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.formatting import to_json
from samkv_integrations.model.model import Model

_Made = TypeVar("_Made")

_PACKAGE = Path(samkv_integrations.__file__).parent
_PASSES = frozenset(
    {
        "engine.chunks",
        "engine.engine",
        "engine.prefill",
        "engine.scheduler",
        "model.attention",
        "model.model",
    }
)
"""Modules that run the pass itself: what they call is a stage, they are none."""

_LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """What to cache: ``n_chunks`` random texts of each length. The rest is as in `LatencyConfig`.

    Raises UnknownOption or InvalidOption for what cannot be measured.
    """

    shape: str = "qwen2.5-0.5b"
    layers: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    n_chunks: tuple[int, ...] = (8,)
    chunk_tokens: tuple[int, ...] = (512,)
    repeats: int = 3
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        models.check(self.shape, self.layers, self.dtype)
        check_counts("chunks", self.n_chunks, 1)
        check_counts("chunk_tokens", self.chunk_tokens, 1)
        check_counts("repeats", [self.repeats], 1)
        check_folder(self.folder)

    def model(self) -> Model:
        """The model of this shape."""
        return models.build(
            self.shape, layers=self.layers, dtype=self.dtype, device=self.device, seed=self.seed,
            window=max(self.chunk_tokens) + 64,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of caching the same texts in one round.

    forward_s: transformers' own forward over the batches that ingest makes of them. memory_s: into
    memory. disk_s: into a folder.
    """

    forward_s: float
    memory_s: float
    disk_s: float


def run(config: IngestConfig) -> Iterator[dict[str, Any]]:
    """A row for each number and length of chunks, the three ways taking turns in one process.

    Raises InvalidChunk if a chunk exceeds the context window.
    """
    model = config.model()
    words = models.Words(model, config.seed)
    for length in config.chunk_tokens:
        texts = [words.text(length) for _ in range(max(config.n_chunks))]
        for n_chunks in config.n_chunks:
            with tempfile.TemporaryDirectory(dir=config.folder) as folder:
                rows, stages = _measure(model, texts[:n_chunks], Path(folder), config.repeats)
            n_tokens = sum(map(words.count, texts[:n_chunks]))
            yield {
                "shape": config.shape,
                "model": model.name,
                "layers": model.n_layers,
                "dtype": model.dtype_name,
                "device": models.device_name(model),
                "threads": torch.get_num_threads(),
                "repeats": config.repeats,
                "n_chunks": n_chunks,
                "chunk_tokens": length,
                "n_tokens": n_tokens,
                **figures(rows, n_tokens),
                "stages": stages,
            }


def figures(rounds: Sequence[Round], n_tokens: int) -> dict[str, float]:
    """Medians over rounds, the shares and the ratio each taken within its round.

    speed_ratio: tokens per second of caching into a folder over those of the plain forward, which
    is the share of its time that the forward takes too. The rest of it: analysis_share for what is
    computed and copied besides, write_share for the files. Noise may make one negative.
    """

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, rounds))

    return {
        "tokens_per_s": median(lambda r: n_tokens / r.disk_s),
        "forward_tokens_per_s": median(lambda r: n_tokens / r.forward_s),
        "speed_ratio": median(lambda r: r.forward_s / r.disk_s),
        "analysis_share": median(lambda r: (r.memory_s - r.forward_s) / r.disk_s),
        "write_share": median(lambda r: (r.disk_s - r.memory_s) / r.disk_s),
    }


def _measure(
    model: Model, texts: Sequence[str], folder: Path, repeats: int
) -> tuple[list[Round], dict[str, float]]:
    """The rounds that count, after one that warms up and finds the batches; and the stages."""
    with _recorded_batches(model) as batches:
        Engine(model, MemoryStore(), prefix="bos").cache_chunks(texts)
    rounds = []
    for round_ in range(repeats + 1):
        to_memory = Engine(model, MemoryStore(), prefix="bos")
        to_disk = Engine(model, ChunkStore(folder / f"kv{round_}"), prefix="bos")
        measured = Round(
            forward_s=seconds_of(model, partial(_forward, model, batches)),
            memory_s=seconds_of(model, partial(to_memory.cache_chunks, texts)),
            disk_s=seconds_of(model, partial(to_disk.cache_chunks, texts)),
        )
        rounds.append(measured)
    # Python's profiler sees one thread
    store, here = ChunkStore(folder / "profiled"), _OnThisThread(model)
    profiled = Engine(model, store, scheduler=here, prefix="bos")
    return rounds[1:], stages_of(lambda: profiled.cache_chunks(texts))


class _OnThisThread(Scheduler):
    """Runs the model where it is asked to."""

    def run(self, work: Callable[[], _Made]) -> _Made:
        with torch.inference_mode():
            return work()


def seconds_of(model: Model, call: Callable[[], object]) -> float:
    """Seconds that ``call`` takes, until the model's device is done with it."""
    began = time.perf_counter()
    call()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began


@contextmanager
def _recorded_batches(model: Model) -> Iterator[list[Tensor]]:
    """Token ids (batch, R) of every pass that is made inside, as they reach the embedding."""
    batches: list[Tensor] = []
    hook = model.hf.model.embed_tokens.register_forward_pre_hook(
        lambda _, arguments: batches.append(arguments[0].clone())
    )
    try:
        yield batches
    finally:
        hook.remove()


def _forward(model: Model, batches: Sequence[Tensor]) -> None:
    """Transformers' own forward of ``batches``; no logits, and nothing is kept."""
    with torch.inference_mode():
        for ids in batches:
            model.hf.model(input_ids=ids, use_cache=False)


def stages_of(call: Callable[[], object]) -> dict[str, float]:
    """``module.function`` of this package -> share of the time of ``call``, largest first.

    A stage is a function that a pass calls in another module, counted with all that it calls; so
    stages may lie in one another (writing encodes). Taken with Python's profiler in a run of its
    own, on this thread: files are written by others; stages below a hundredth are left out.
    """
    profiler = cProfile.Profile()
    began = time.perf_counter()
    profiler.runcall(call)
    total_s = time.perf_counter() - began
    found: dict[str, float] = {}
    stats: Mapping[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, _, function), (_, _, _, _, callers) in stats.items():
        module = _module(file)
        if module is None or module in _PASSES:
            continue
        entered_s = sum(
            caller[3] for (other, _, _), caller in callers.items() if _module(other) != module
        )
        if entered_s >= _LEAST_SHARE * total_s:
            name = f"{module}.{function}"
            found[name] = found.get(name, 0.0) + entered_s / total_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _module(file: str) -> str | None:
    """Name of the module of this package in ``file``, None if it is of another."""
    path = Path(file)
    if not path.is_relative_to(_PACKAGE):
        return None
    return ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)


_COLUMNS = (
    "n_chunks", "chunk_tokens", "n_tokens", "tokens_per_s", "forward_tokens_per_s", "speed_ratio",
    "analysis_share", "write_share",
)  # fmt: skip


def ingest(
    shape: own.Shape = "qwen2.5-0.5b", layers: own.Layers = None, dtype: args.Dtype = "auto",
    device: own.ShapeDevice = "cpu", chunks: own.Chunks = "8",
    chunk_tokens: own.ChunkTokens = "512", repeats: own.Repeats = 3,
    folder: own.BenchFolder = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Tokens per second of caching chunks, against a plain forward over the same texts."""
    config = IngestConfig(
        shape=shape, layers=layers, dtype=dtype, device=device, repeats=repeats, folder=folder,
        n_chunks=tuple(counts("--chunks", chunks)),
        chunk_tokens=tuple(counts("--chunk-tokens", chunk_tokens)),
    )  # fmt: skip
    use_threads_for(shape)
    rows = list(run(config))
    if as_json:
        typer.echo(to_json("benchmarks ingest", rows[0]["model"], rows))
        return
    typer.echo(time_table(_COLUMNS, rows))
    for row in rows:
        stages = ", ".join(f"{name} {share:.1%}" for name, share in row["stages"].items())
        typer.echo(f"\n{row['n_chunks']} chunks of {row['chunk_tokens']}: {stages}")


app = command_line(ingest)


def main() -> None:
    """Run the benchmark as the command line says."""
    app(prog_name="python -m benchmarks ingest")


if __name__ == "__main__":
    main()
