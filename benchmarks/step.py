"""CPU milliseconds of a later token behind a context, beside llama.cpp's and those of its products.

    OMP_NUM_THREADS=1 python -m benchmarks step --model FILE.gguf --peer-python PYTHON

The peer, a process of llama-cpp-python, answers the same prompt from the same file; without
``--peer-python`` its column is left out. Ways take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from benchmarks.answer_grid import Peer, Texts
from benchmarks.commands import command_line, counts, markdown_table
from benchmarks.run_settings import hardware
from samkv_integrations.engine import Engine
from samkv_integrations.options import AnswerSettings
from samkv_integrations.runtimes.base import Observer
from samkv_integrations.runtimes.model_files import smollm2
from samkv_integrations.runtimes.transformers.loading import load_model
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.first_token import first_token
from samkv_integrations.store.disk import ChunkStore

STEPS = 64


def products(model: Model) -> list[Callable[[], Tensor]]:
    """The matrix products of a step, in order."""
    return [
        partial(module.forward, torch.randn(1, module.in_features, dtype=model.dtype))
        for module in model.hf.modules()
        if isinstance(module, nn.Linear)
    ]


def milliseconds(work: Callable[[], object], n: int) -> float:
    """CPU milliseconds of each of ``n`` calls."""
    began = time.process_time()
    for _ in range(n):
        work()
    return 1000 * (time.process_time() - began) / n


def step(
    model: Annotated[str, typer.Option(help="GGUF file or 'smollm2'.")] = "smollm2",
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts: 500,1000,...")] = "970",
    peer_python: Annotated[
        str | None, typer.Option(help="A Python that has llama-cpp-python.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Of 64 tokens each.")] = 5,
) -> None:
    """CPU time of a later token, beside llama.cpp's and the sum of its products."""
    loaded = load_model(model)
    multiply, texts, peer = products(loaded), Texts(loaded), None
    if peer_python is not None:
        peer = Peer(peer_python, str(smollm2() if model == "smollm2" else model))
    cells = []
    for context in counts("--contexts", contexts):
        prompt, spent = texts.next(context), dict[str, list[float]]()
        with TemporaryDirectory() as folder:
            engine = Engine(loaded, ChunkStore(folder))
            for _ in range(rounds + 1):  # the first one warms up
                for name, found in _round(engine, prompt, multiply, peer).items():
                    spent.setdefault(name, []).append(found)
        mine, sums, *peers = (median(each[1:]) for each in spent.values())
        cells.append([str(context), f"{mine:.1f}", f"{sums:.1f}", f"{mine / sums:.2f}"])
        for theirs in peers:
            cells[-1] += [f"{theirs:.1f}", f"{mine / theirs:.2f}"]
    columns = ["context", "step, ms", "its products", "step, of them"]
    columns += ["llama.cpp", "step, of llama.cpp"] if peer else []
    typer.echo(f"{hardware(loaded)}", err=True)
    typer.echo(markdown_table(columns, cells))


def _round(
    engine: Engine, prompt: str, multiply: list[Callable[[], Tensor]], peer: Peer | None
) -> dict[str, float]:
    """Milliseconds of each way."""

    def ours(_: Callable[[], None]) -> dict[str, float]:
        with engine.resolve(prompt, []) as resolved:
            settings = AnswerSettings.of(method="recompute", eviction="none")
            request = engine.request(resolved, settings, capacity=STEPS + 1)
            sequence, token = first_token(request, Observer()).sequence, 0

        def decode() -> None:
            nonlocal token
            ((logits,),) = engine.model.decode([sequence], [[token]])
            token = int(logits.argmax())

        step = milliseconds(decode, STEPS)
        with torch.inference_mode():
            return {"ours": step, "sum": milliseconds(lambda: [run() for run in multiply], 20)}

    found = engine.scheduler.run(ours)
    if peer is not None:
        told = peer.answer(engine.model.tokenize(prompt, special=True), STEPS + 1)
        found["llama.cpp"] = 1000 * told["later_cpu_s"] / STEPS
    return found


app = command_line(step)
main = app
