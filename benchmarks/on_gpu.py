"""First token, decode and peak memory on a GPU, against plain transformers on the same model.

    python -m benchmarks.on_gpu --shape llama-3.1-8b --cells 10x1024 32x512

Random weights in the shape of models that people use, in bfloat16. The ways take turns, and figures
are medians over rounds: seconds of an answer of one token, and of a later token. --profile says
besides where the time of one first token goes, and where the host waits for the device.

    python -m benchmarks.on_gpu --answers 12 --model smollm2

Greedy answers of a real model there against those on the processor, float32 on both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import models
from benchmarks.answer_grid import Texts
from benchmarks.memory import peak_of
from benchmarks.models import Words
from benchmarks.run_settings import hardware
from benchmarks.shapes import SHAPES
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cli.tables import markdown_table as table
from samkv_integrations.engine.engine import Engine
from samkv_integrations.formatting import commit, to_json
from samkv_integrations.model.identity import weights_digest
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.rag_template import rag_prompt

PLAIN = "plain transformers"
WAYS = (PLAIN, "recompute", "reuse", "epic", "samkv-guided", "auto")
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {
        **SHAPES["qwen3-8b"], "model_type": "qwen3_moe", "hidden_size": 2_048,
        "intermediate_size": 6_144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
N_STEPS = 32


def build(shape: str, device: str, layers: int | None) -> Model:
    """The model of a shape with random weights, whose answers no token ends."""
    fields = dict({**SHAPES, **MIXTURES}[shape])
    if layers is not None:
        fields["num_hidden_layers"] = layers
    name = f"{shape} (random weights)"
    model = models.random_model(fields, name=name, dtype="bfloat16", device=device, seed=0)
    model.eos_ids = frozenset()
    # made again from the same seed, they are the same: 61 GB need not be hashed
    model.identity._digests["weights"] = f"{shape} of {fields['num_hidden_layers']} layers"
    return model


class Ways:
    """An engine over some chunks, and each way to answer a prompt of them."""

    def __init__(self, model: Model, folder: Path, n_chunks: int, chunk_tokens: int) -> None:
        words = Words(model, 0)
        self.model, self.chunks = model, [words.text(chunk_tokens) for _ in range(n_chunks)]
        self.engine = Engine(model, ChunkStore(folder / f"{n_chunks}x{chunk_tokens}"))
        began = time.perf_counter()
        self.engine.cache_chunks(self.chunks)
        self.ingest_s = time.perf_counter() - began
        self.engine.calibrate()  # as `samkv doctor` does; auto goes by it
        self.prompt = str(rag_prompt("What is the name of the river?", self.chunks))

    def __call__(self, way: str, n_tokens: int) -> tuple[float, Any]:
        """Seconds of an answer of so many tokens, and its report; the device has ended."""
        self.engine.prefixes.clear()
        wait_for(self.model.device)
        began = time.perf_counter()
        report = None
        if way == PLAIN:
            ids = self.model.tokenizer(self.prompt, return_tensors="pt").to(self.model.device)
            ids.pop("token_type_ids", None)
            with torch.inference_mode():
                made = self.model.hf.generate(
                    **ids, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
            self.model.tokenizer.decode(made[0, -n_tokens:])
        else:
            report = self.engine.generate(self.prompt, method=way, max_new_tokens=n_tokens).report
        wait_for(self.model.device)
        return time.perf_counter() - began, report

    def profiled(self, way: str) -> str:
        """Where the time of a first token goes, and the lines at which the host waits."""
        on_gpu = self.model.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=kinds, experimental_config=every) as found:
            self(way, 1)
        events = found.key_averages()
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        parts = [events.table(sort_by=by, row_limit=28, max_name_column_width=70)]
        parts.append(events.table(sort_by="self_cpu_time_total", row_limit=18))
        if on_gpu:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                self(way, 1)
                torch.cuda.set_sync_debug_mode("default")
            waits = Counter(f"{each.filename.split('/')[-1]}:{each.lineno}" for each in seen)
            parts.append("\n".join(f"{n} waits at {at}" for at, n in waits.most_common(25)))
        return "\n\n".join(parts)


def wait_for(device: torch.device) -> None:
    """Until it has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(ways: Ways, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A row of each way."""
    first: dict[str, list[float]] = {name: [] for name in names}
    step: dict[str, list[float]] = {name: [] for name in names}
    reports: dict[str, Any] = {}
    for at in range(rounds + 1):
        for name in names:
            spent, reports[name] = ways(name, 1)
            whole, _ = ways(name, 1 + N_STEPS)
            if at:  # the round before them warms up
                first[name].append(spent)
                step[name].append((whole - spent) / N_STEPS)
    rows = []
    for name in names:
        report = reports[name]
        rows.append({
            "way": name, "ran": report.ran if report else name,
            "chunks": len(ways.chunks), "prompt_tokens": report.prompt_tokens if report else None,
            "first_s": statistics.median(first[name]),
            "first_ratio": statistics.median(map(_over, first[name], first[names[0]])),
            "step_ms": 1000 * statistics.median(step[name]),
            "step_ratio": statistics.median(map(_over, step[name], step[names[0]])),
            "peak_gb": peak_of(partial(ways, name, 1), ways.model.device).tensor_bytes / 1e9,
            "read_gb": report.bytes_read / 1e9 if report else 0.0,
            **({f"{stage}_s": getattr(report, f"{stage}_s")
                for stage in ("ttft", "load", "select", "probe", "blend")} if report else {}),
        })  # fmt: skip
    return rows


def answers(name: str, device: str, n: int) -> str:
    """How many greedy answers of 32 tokens over real paragraphs are those of the processor."""
    here, there = (load_model(name, device=one, dtype="float32") for one in ("cpu", device))
    texts = Texts(here)
    chunks = [texts.next(160) for _ in range(5 * n)]
    engines = [Engine(here, MemoryStore()), Engine(there, MemoryStore())]
    for engine in engines:
        engine.cache_chunks(chunks)
    lines = []
    for way in ("recompute", "reuse", "samkv-guided"):
        pairs = []
        for at in range(n):
            held = chunks[5 * at : 5 * at + 5]
            prompt = rag_prompt("What do the texts say about this?", held, chat=here.asks_in_chat)
            pairs.append([
                engine.generate(prompt, method=way, max_new_tokens=N_STEPS).text
                for engine in engines
            ])  # fmt: skip
        same = sum(one == other for one, other in pairs)
        lines.append(f"{way}: {same} of {n} answers are the processor's")
    return "\n".join(lines)


def _over(mine: float, base: float) -> float:
    return mine / base


def main() -> None:
    """A table of each cell on standard output, and all rows in a file with ``--json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=[*SHAPES, *MIXTURES])
    parser.add_argument("--layers", type=int, help="of the shape's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cells", nargs="+", default=["10x1024"], help="chunks x their tokens")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", metavar="WAY")
    parser.add_argument("--digest", action="store_true", help="time the hash of all weights")
    parser.add_argument("--answers", type=int, help="compared with the processor's")
    parser.add_argument("--model", default="smollm2", help="that answers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.answers:
        sys.stdout.write(f"{answers(args.model, args.device, args.answers)}\n")
        return
    names = [PLAIN, *(way for way in args.ways if way != PLAIN)]
    model = build(args.shape, args.device, args.layers)
    began = time.perf_counter()
    if args.digest:
        weights_digest(model.hf)
        sys.stdout.write(f"hashing all weights took {time.perf_counter() - began:.1f} s\n")
    sys.stdout.write(f"{model.name}, {hardware(model)['device']}, commit {commit()}\n")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in args.cells:
            ways = Ways(model, Path(folder), *map(int, cell.split("x")))
            found = rows_of(ways, names, args.rounds)
            rows += [{"cell": cell, "ingest_s": ways.ingest_s, **row} for row in found]
            columns = [name for name, value in found[-1].items() if isinstance(value, float)]
            lines = [
                [row["way"], row["ran"], *(f"{row.get(name, 0.0):.3f}" for name in columns)]
                for row in found
            ]  # fmt: skip
            sys.stdout.write(
                f"\n{cell}: {found[-1]['prompt_tokens']} tokens, ingest "
                f"{ways.ingest_s:.2f} s\n{table(('way', 'ran', *columns), lines)}\n"
            )
            sys.stdout.flush()
            if args.profile:
                sys.stdout.write(f"{ways.profiled(args.profile)}\n")
    if args.json:
        args.json.write_text(to_json("on_gpu", model.name, rows, hardware(model)))


if __name__ == "__main__":
    main()
