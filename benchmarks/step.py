"""CPU milliseconds of a later token behind cached chunks, beside what others take for it.

    OMP_NUM_THREADS=1 python -m benchmarks step --runtime llama_cpp --model FILE.gguf

Answers are read as users read them, from `Engine.stream`; the first token does not count. With
llama.cpp the anchor is `benchmarks.llama_loop` over the same prompt, with transformers the matrix
products of a step. Ways take turns; ratios are medians and quartiles of the rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks import options as own
from benchmarks.answer_grid import Texts
from benchmarks.commands import command_line, counts, loaded_model, show_run
from benchmarks.llama_loop import LlamaLoop
from benchmarks.pairs import spread
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.formatting import Row
from samkv_integrations.engine import Engine
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore

STEPS = 64
CHUNKS = 4

COLUMNS = ("context", "step, ms", "anchor", "anchor, ms", "step, of the anchor",
           "tokens a step")  # fmt: skip

Anchor = Callable[[Sequence[int]], float]
"""CPU milliseconds of a step behind a prompt of these tokens."""


def products(model: Model) -> list[Callable[[], Tensor]]:
    """The matrix products of a step, in order."""
    return [
        partial(module.forward, torch.randn(1, module.in_features, dtype=model.dtype))
        for module in model.hf.modules()
        if isinstance(module, nn.Linear)
    ]


def of_products(model: Model) -> Anchor:
    """The sum of the products."""
    multiply = products(model)

    def spent(ids: Sequence[int]) -> float:
        with torch.inference_mode():
            began = time.process_time()
            for _ in range(20):
                for run in multiply:
                    run()
            return 1000 * (time.process_time() - began) / 20

    return spent


def of_loop(model: LlamaCppModel) -> Anchor:
    """llama.cpp's own steps."""
    loop = LlamaLoop(model)

    def spent(ids: Sequence[int]) -> float:
        tokens = loop.tokens(ids)
        next(tokens)
        began = time.process_time()
        for _ in range(STEPS):
            next(tokens)
        return 1000 * (time.process_time() - began) / STEPS

    return spent


def step(
    model: Annotated[str, typer.Option(help="GGUF file or 'smollm2'.")] = "smollm2",
    runtime: own.OfRuntime = "transformers",
    dtype: args.Dtype = "auto",
    contexts: Annotated[str, typer.Option(help="Tokens of the chunks: 500,1000,...")] = "1000,4000",
    rounds: Annotated[int, typer.Option(help="Of 64 tokens each.")] = 5,
    as_json: args.Json = False,
) -> None:
    """CPU time of a later token, beside llama.cpp's, or the sum of its products."""
    loaded = loaded_model(model, "auto", dtype, runtime)
    loaded.end_ids = lambda more: frozenset()
    name, anchor = (
        ("llama.cpp", of_loop(loaded)) if runtime == "llama_cpp"
        else ("its products", of_products(loaded))
    )  # fmt: skip
    rows = [
        _row(loaded, n_tokens, name, anchor, rounds) for n_tokens in counts("--contexts", contexts)
    ]
    show_run(loaded, COLUMNS, rows, as_json=as_json)


def _row(model: Runtime, context: int, name: str, anchor: Anchor, rounds: int) -> Row:
    """Both ways over the same prompts, whose chunks are new in each round."""
    texts, order = Texts(model), random.Random(0)
    mine, theirs, of_step = list[float](), list[float](), list[float]()

    def ours() -> None:
        spent, tokens_per_step = _ours(engine, prompt, chunks)
        mine.append(spent)
        of_step.append(tokens_per_step)

    for _ in range(rounds + 1):  # the first one warms up
        chunks = [texts.next(context // CHUNKS) for _ in range(CHUNKS)]
        prompt = rag_prompt("What is it about?", chunks, chat=model.has_chat_template)
        with TemporaryDirectory() as folder:
            engine = Engine(model, ChunkStore(folder))
            engine.cache_chunks(chunks)
            ids = model.tokenize_prompt(engine.render(prompt))
            if order.random() < 0.5:
                ours()
                theirs.append(anchor(ids))
            else:
                theirs.append(anchor(ids))
                ours()
    of_pairs = [one / other for one, other in zip(mine[1:], theirs[1:], strict=True)]
    figures = context, spread(mine[1:]), name, spread(theirs[1:]), spread(of_pairs), max(of_step)
    return dict(zip(COLUMNS, figures, strict=True))


def _ours(engine: Engine, prompt: Any, chunks: Sequence[str]) -> tuple[float, float]:  # noqa: ANN401
    """CPU milliseconds of a later token of a streamed answer, and tokens of a step, with drafts."""
    with engine.stream(prompt, chunks, method="reuse", max_new_tokens=STEPS + 1) as stream:
        began = time.process_time()
        for _ in stream:
            pass
        spent = 1000 * (time.process_time() - began) / STEPS
        return spent, stream.report.tokens_per_step


app = command_line(step)
main = app
