"""How much faster two workers on Ray ingest than one, and whether the files are the same.

    python -m benchmarks.ray_ingest --workers 1,2 --repeats 3

Each worker has one CPU and one thread. Work is timed from the first batch's beginning to the last
one's end; the start of Ray and the loading of models stand beside it. Every ingest is into an empty
store of the same secret, so that equal chunks have equal files. Numbers of workers take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.models import Words, build, save
from benchmarks.shapes import BUILTIN
from benchmarks.store_parts import report
from samkv_integrations import ChunkStore
from samkv_integrations.cluster import ModelSource, WorkerPool, cache_on_ray, engine_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """The ingests of one number of workers; median and, for the work, all repeats.

    times_as_fast: as with the first number of workers, by the work alone. same_files: whether all
    files have the bytes of the first ingest. load: processes that could run, per processor, as the
    ingests ended.
    """

    workers: int
    work_s: float
    work_s_each: str
    total_s: float
    times_as_fast: float
    same_files: bool
    load: float


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """One ingest: its figures and a digest of its files."""

    work_s: float
    total_s: float
    digest: str
    load: float


def digest_of(folder: Path) -> str:
    """Of the chunk files in a folder, their paths included."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def ingest(model: str, empty: Path, folder: Path, texts: list[str], n_workers: int) -> Ingest:
    """Cache ``texts`` in a copy of the store ``empty``."""
    shutil.copytree(empty, folder)
    source = ModelSource(model_name=model, kv_dir=folder, device_map="cpu")
    done = cache_on_ray(engine_of(source), source, texts, WorkerPool(n_workers=n_workers))
    assert done.n_cached == len(texts), done
    found = digest_of(folder)
    shutil.rmtree(folder)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Ingest(work_s=done.working_s, total_s=done.seconds, digest=found, load=load)


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """The ingests of all numbers of workers, in turns."""
    numbers = [int(number) for number in arguments.workers.split(",")]
    layers = None if arguments.shape == BUILTIN else arguments.layers
    built = build(
        arguments.shape, layers=layers, dtype=arguments.dtype, device="cpu", seed=0,
        window=arguments.tokens + 1,
    )  # fmt: skip
    model = BUILTIN
    if arguments.shape != BUILTIN:
        model = str(folder / "model")
        save(built, Path(model))
    words = Words(built, seed=0)
    texts = [words.text(arguments.tokens) for _ in range(arguments.chunks)]
    del built
    ChunkStore(folder / "empty")
    found: dict[int, list[Ingest]] = {number: [] for number in numbers}
    for repeat in range(arguments.repeats):
        for number in numbers if repeat % 2 == 0 else reversed(numbers):
            found[number].append(ingest(model, folder / "empty", folder / "kv", texts, number))
    first = found[numbers[0]]
    return [
        Row(
            workers=number,
            work_s=median(one.work_s for one in found[number]),
            work_s_each=" ".join(f"{one.work_s:.1f}" for one in found[number]),
            total_s=median(one.total_s for one in found[number]),
            times_as_fast=median(one.work_s for one in first)
            / median(one.work_s for one in found[number]),
            same_files=all(one.digest == first[0].digest for one in found[number]),
            load=max(one.load for one in found[number]),
        )
        for number in numbers
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2", help="the first is what others stand against")
    parser.add_argument(
        "--shape", default="qwen2.5-0.5b", help="as of 'python -m benchmarks ingest'"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="for model and stores; else a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        rows = [asdict(row) for row in measure(arguments, Path(folder))]
    for row in rows:
        row |= {name: round(value, 2) for name, value in row.items() if isinstance(value, float)}
    report("ray_ingest", rows, arguments.json)


if __name__ == "__main__":
    main()
