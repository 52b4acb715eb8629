"""Everything that a GPU is asked for, in ten minutes, the most important first.

    python -m benchmarks on_gpu --all --output rows.jsonl
    python -m benchmarks on_gpu --all --dry-run               # a tiny model, on a CPU

Each part is a process of its own with a limit of its own, so a slow or failing one does not stop
the others. Rows are written as they are measured. Weights are random, in a shape that people use
and in bfloat16; nothing is downloaded. ``--parts paper`` needs no GPU: what fits on which card.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import ingest, models
from benchmarks import options as own
from benchmarks.answer_grid import Texts
from benchmarks.commands import command_line
from benchmarks.models import Words
from benchmarks.run_settings import hardware
from benchmarks.shapes import SHAPES
from samkv_integrations.cli.formatting import Row, commit
from samkv_integrations.cli.loading import words
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.prompt.rag_template import rag_prompt
from samkv_integrations.report import Report
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore

ROOT = Path(__file__).parents[1]
TINY: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 2_880, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4_096,
}  # fmt: skip
N_BEFORE, N_STEPS = 1, 32
"""First tokens of an answer, which are not timed; and those that are."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is measured. cells: chunks of a prompt, and the tokens of each."""

    shape: str
    device: str
    cells: tuple[tuple[int, int], ...]
    method: str
    rounds: int
    answer_models: tuple[str, ...]
    folder: Path

    @cached_property
    def model(self) -> Model:
        """Random weights, the same in every part, whose answers no token ends."""
        fields = TINY if self.shape == "tiny" else SHAPES[self.shape]
        model = models.random_model(
            fields, name=self.shape, dtype="bfloat16", device=self.device, seed=0
        )
        model.eos_ids = frozenset()
        model.identity._digests["weights"] = f"{self.shape}, random"  # 16 GB need not be hashed
        return model

    def engine(self, n_chunks: int, chunk_tokens: int) -> tuple[Engine, str]:
        """An engine that has cached the chunks of a cell, and a prompt of all of them."""
        texts = Words(self.model, 0)
        chunks = [texts.text(chunk_tokens) for _ in range(n_chunks)]
        store = ChunkStore(self.folder / f"{n_chunks}x{chunk_tokens}")
        engine = Engine(self.model, store, prefix_bytes=0, hot_bytes=2**31)
        engine.cache_chunks(chunks)
        return engine, str(rag_prompt("What is the name of the river?", chunks))

    def ask(self, engine: Engine, prompt: str, reports: list[Report]) -> None:
        """Answer with one token; its report comes to the others."""
        reports.append(engine.generate(prompt, method=self.method, max_new_tokens=1).report)

    def plain(self, prompt: str, n_tokens: int, batch: int = 1) -> None:
        """Transformers' own greedy answers."""
        ids = self.model.tokenizer([prompt] * batch, return_tensors="pt").to(self.model.device)
        ids.pop("token_type_ids", None)
        with torch.inference_mode():
            made = self.model.hf.generate(  # type: ignore[operator]
                **ids, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        self.model.tokenizer.batch_decode(made[:, -n_tokens:])

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds until the device has done what ``call`` tells it."""
        began = time.perf_counter()
        call()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - began


# -- parts, the most important first -----------------------------------------------------------


def first_token(run: Run) -> Iterator[Row]:
    """Seconds to the first token: of the third question hot, of the second pinned, of the first
    from disk; each over plain transformers in the same round."""
    for cell in run.cells:
        engine, prompt = run.engine(*cell)
        asked: list[Report] = []
        ask = partial(run.ask, engine, prompt, asked)
        rounds: list[list[float]] = []
        for round_ in range(run.rounds + 1):
            engine.chunks.reader.clear()
            calls = (partial(run.plain, prompt, 1), ask, ask, ask)
            rounds.append([run.seconds(call) for call in calls])
            yield {"cell": cell, "round": round_, "plain, disk, pinned, hot": rounds[-1]}
        of_rounds = list(zip(*rounds[1:], strict=True))  # the round before them warms up
        for at, where in ((3, "hot"), (2, "pinned"), (1, "disk"), (0, "plain")):
            ratios = [mine / plain for mine, plain in zip(of_rounds[at], of_rounds[0], strict=True)]
            report = asked[at - 4]  # of the last round
            yield {
                "cell": cell, "where": where, "seconds": statistics.median(of_rounds[at]),
                "over_plain": statistics.median(ratios), "prompt_tokens": report.prompt_tokens,
                **({"ran": report.ran, "recomputed": round(report.recompute_ratio, 4),
                    "bytes_read": report.bytes_read} if at else {}),
            }  # fmt: skip


def where_time_goes(run: Run) -> Iterator[Row]:
    """Kernels, launches, and lines at which the host waits, of a hot first token."""
    engine, prompt = run.engine(*run.cells[0])
    ask = partial(run.ask, engine, prompt, list[Report]())
    for _ in range(3):
        ask()
    on_gpu = run.model.device.type == "cuda"
    if on_gpu:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            ask()
            torch.cuda.set_sync_debug_mode("default")
        at = Counter(f"{each.filename.split('/')[-1]}:{each.lineno}" for each in seen)
        yield {"host_waits": sum(at.values()), "at": dict(at.most_common(12))}
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=every) as found:
        whole = run.seconds(ask)
    of, events = "self_device_time_total" if on_gpu else "self_cpu_time_total", found.key_averages()
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    total = sum(getattr(event, of) for event in events) / 1e6
    yield {"profiled_s": whole, "kernels_s": total, "launches": launches}
    for event in sorted(events, key=lambda event: -getattr(event, of))[:16]:
        yield {"name": event.key[:70], "ms": getattr(event, of) / 1e3, "count": event.count}


def ingest_over_forward(run: Run) -> Iterator[Row]:
    """Caching chunks, in plain forwards over the same texts."""
    for n_chunks, chunk_tokens in run.cells:
        texts = ingest.texts_of(run.model, 2 * n_chunks, chunk_tokens)
        folder = run.folder / f"ingest{chunk_tokens}"
        batches = ingest.forwards_of_transformers(run.model, texts)
        found = ingest.measured(run.model, batches, folder, min(2, run.rounds))
        yield {"chunks": len(texts), "chunk_tokens": chunk_tokens, **found}


def later_token(run: Run) -> Iterator[Row]:
    """Milliseconds of a later token of 1 and of 8 answers at a time, over plain transformers."""
    engine, prompt = run.engine(*run.cells[-1])

    def ours(prompt: str, n_tokens: int, batch: int) -> None:
        with ThreadPoolExecutor(batch) as pool:
            ask = partial(engine.generate, method=run.method, max_new_tokens=n_tokens)
            list(pool.map(ask, [prompt] * batch))

    for batch in (1, 8):
        steps: dict[str, list[float]] = {"plain": [], "ours": []}
        for round_ in range(run.rounds + 1):
            for name in steps:
                answer = partial(run.plain if name == "plain" else ours, prompt, batch=batch)
                first, whole = (
                    run.seconds(partial(answer, n_tokens=n)) for n in (N_BEFORE, N_BEFORE + N_STEPS)
                )
                if round_:
                    steps[name].append(1000 * (whole - first) / N_STEPS)
        plain, mine = map(statistics.median, steps.values())
        yield {"batch": batch, "steps": "plain", "ms": plain}
        yield {"batch": batch, "steps": "ours", "ms": mine, "over_plain": mine / plain}


def answers(run: Run) -> Iterator[Row]:
    """How many greedy answers over real paragraphs are the processor's, float32 on both."""
    for name in run.answer_models:
        try:
            here, there = (load_model(name, device=at, dtype="float32")
                           for at in ("cpu", run.device))  # fmt: skip
        except Exception as error:  # whatever reads a model that is not there
            yield {"model": Path(name).name, "skipped": f"{error}"[:200]}
            continue
        texts, engines = Texts(here), [Engine(model, MemoryStore()) for model in (here, there)]
        chunks, n_asked = [texts.next(120) for _ in range(4)], 4 * run.rounds
        for engine in engines:
            engine.cache_chunks(chunks)
        for method in ("recompute", run.method):
            same = 0
            for at in range(n_asked):
                question = f"What do the texts say about {chunks[at % 4].split()[at]}?"
                prompt = rag_prompt(question, chunks, chat=here.asks_in_chat)
                one, other = (
                    engine.generate(prompt, method=method, max_new_tokens=24).text
                    for engine in engines
                )
                same += one == other
            yield {"model": Path(name).name, "method": method, "same": same, "of": n_asked}


def tests(run: Run) -> Iterator[Row]:
    """The short ones of the tests that need a GPU."""
    command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    chosen = ["-k", "kernel or every_method or sampling or hot or (llama and float32)"]
    limit = PARTS["tests"][0] - 10  # so that it ends before this process is ended
    done = subprocess.run(
        [sys.executable, *command, *chosen], cwd=ROOT, capture_output=True, text=True,
        timeout=limit, check=False,
    )  # fmt: skip
    yield {"exit": done.returncode, "said": done.stdout.strip().splitlines()[-12:]}


PARTS: Mapping[str, tuple[int, Callable[[Run], Iterator[Row]]]] = {
    "first": (150, first_token), "where": (60, where_time_goes),
    "ingest": (100, ingest_over_forward), "later": (130, later_token),
    "answers": (75, answers), "tests": (60, tests),
}  # fmt: skip
"""Name -> its limit in seconds, 575 together, and what measures it."""


# -- on paper ------------------------------------------------------------------------------------


def fits(shape: str, card_bytes: float, n_answers: int = 8) -> Row:
    """What a card holds, with weights as bitsandbytes packs them (NF4), and entries in bfloat16.

    A gigabyte is left to CUDA and to the tensors of a pass. hot_chunks: of 512 tokens, in 4 bits,
    in a tenth of what is left. answer_tokens: of each answer, prompt included, in the rest.
    """
    fields = dict(SHAPES[shape])
    with torch.device("meta"):
        hf: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.bfloat16
        )
    packed = sum(each.numel() for each in hf.get_decoder().layers.parameters() if each.dim() == 2)
    others = sum(each.numel() for each in hf.parameters()) - packed
    weights = packed * (4 + 32 / 64) / 8 + 2 * others  # a float32 scale for 64 weights
    n_layers, config = hf.config.num_hidden_layers, hf.config
    kind = {"n_kv_heads": config.num_key_value_heads, "dtype": torch.bfloat16,
            "head_dim": getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads}  # fmt: skip
    stored, computed = (EntryFormat(bits=bits, **kind) for bits in (4, 16))
    n_range = torch.Size(stored.range_shape(512)).numel()
    chunk = n_layers * (512 * stored.n_bytes + 2 * n_range)
    free = card_bytes - weights - 1e9
    rest = int(0.9 * free / (n_answers * n_layers * computed.n_bytes))
    return {
        "card_gb": card_bytes / 1e9, "shape": shape, "weights_gb": round(weights / 1e9, 1),
        "hot_gb": round(max(0.0, free / 10) / 1e9, 2), "hot_chunks": max(0, int(free / 10 / chunk)),
        "answer_tokens": max(0, rest),
    }  # fmt: skip


# -- the command ---------------------------------------------------------------------------------


def on_gpu(
    every: Annotated[bool, typer.Option("--all", help="All parts, each with its limit.")] = False,
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}; or paper.")] = "",
    shape: own.Shape = "llama-3.1-8b", device: own.ShapeDevice = "cuda",
    cells: Annotated[str, typer.Option(help="Chunks x their tokens.")] = "10x1024,4x512",
    method: Annotated[str, typer.Option(help="That is timed.")] = "samkv-guided",
    rounds: Annotated[int, typer.Option(help="That count; one more warms up.")] = 3,
    answer_models: Annotated[
        str, typer.Option(help="Whose answers are compared: names and GGUF files.")
    ] = "builtin,smollm2",
    output: Annotated[Path | None, typer.Option(help="File of rows (JSON lines).")] = None,
    dry_run: Annotated[bool, typer.Option(help="A tiny model on the CPU.")] = False,
) -> None:  # fmt: skip
    """First token, where its time goes, ingest, later tokens, answers and tests on a GPU."""
    if dry_run:
        shape, device, cells, rounds, answer_models = "tiny", "cpu", "3x48,2x40", 1, "builtin"
    chosen = list(PARTS) if every else words(parts)
    if chosen != ["paper"] and (not chosen or not {*chosen} <= {*PARTS}):
        raise InvalidOption(f"--parts {parts!r}; give --all, paper, or some of {', '.join(PARTS)}")
    if shape not in (*SHAPES, "tiny"):
        raise UnknownOption.among("shape", shape, [*SHAPES, "tiny"])
    output = output.absolute() if output else None

    def tell(part: str, row: Row) -> None:
        line = json.dumps({"part": part, **row})
        typer.echo(line)
        sys.stdout.flush()
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    if chosen == ["paper"]:
        for card in (8e9, 12e9, 16e9, 24e9):
            for name in ("llama-3.2-3b", "qwen2.5-7b", "llama-3.1-8b", "qwen3-14b"):
                tell("paper", fits(name, card))
        return
    if len(chosen) > 1:
        for part in chosen:
            said = [f"--shape={shape}", f"--device={device}", f"--cells={cells}",
                    f"--method={method}", f"--rounds={rounds}", f"--answer-models={answer_models}",
                    f"--parts={part}", *([f"--output={output}"] if output else [])]  # fmt: skip
            command = [sys.executable, "-m", "benchmarks", "on_gpu", *said]
            try:
                subprocess.run(command, cwd=ROOT, timeout=PARTS[part][0], check=False)
            except subprocess.TimeoutExpired:
                tell(part, {"error": f"stopped after {PARTS[part][0]} s"})
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            shape=shape, device=device, method=method, rounds=rounds, folder=Path(folder),
            cells=tuple(tuple(map(int, cell.split("x"))) for cell in words(cells)),  # type: ignore[misc]
            answer_models=tuple(words(answer_models)),
        )  # fmt: skip
        try:
            for row in PARTS[chosen[0]][1](run):
                tell(chosen[0], row)
        except Exception:
            tell(chosen[0], {"error": traceback.format_exc(limit=-3)})
        where = hardware(run.model)["device"] if "model" in vars(run) else device
        took = time.perf_counter() - began
        tell(chosen[0], {"seconds": took, "device": where, "shape": shape, "commit": commit()})


app = command_line(on_gpu)
main = app
