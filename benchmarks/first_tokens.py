"""First tokens of llama.cpp over cached chunks, beside llama.cpp's own loop over the same prompts.

Each question is a pair: its chunks are cached, then the ways answer it with one token, in random
order, and nothing stays in memory. Our time is that of the whole call, reading the prompt and the
files of the chunks included; the loop gets token ids.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tqdm.auto import tqdm

from benchmarks.llama_loop import LlamaLoop
from benchmarks.pairs import Seconds, ratios, spread, taking_turns
from benchmarks.question_sets import PACKAGES, STANDARD, Asked, questions_of
from samkv_integrations.cli.formatting import Row
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.serving.stream import Answer
from samkv_integrations.store.disk import ChunkStore

COLUMNS = (
    "prompts", "questions", "tokens", "llama.cpp, CPU s", "way", "CPU s, of llama.cpp's",
    "wall time, of llama.cpp's", "recomputed",
)  # fmt: skip
LOOP = "llama.cpp"


def asked_of(questions: Sequence[str], data: Path | None, repeats: int) -> list[Asked]:
    """The first ``repeats`` questions of each kind. Raises InvalidOption without any."""
    specs = [*questions, *([str(data / spec) for spec in STANDARD] if data else ())]
    if data is not None:
        specs.append(str(PACKAGES))
    if not specs:
        raise InvalidOption("no questions; give --questions FILE or --data FOLDER")
    seen, found = Counter[str](), list[Asked]()
    for one in questions_of(specs):
        seen[one.kind] += 1
        if seen[one.kind] <= repeats:
            found.append(one)
    return found


def rows_of(model: LlamaCppModel, asked: Sequence[Asked], methods: Sequence[str]) -> Iterator[Row]:
    """A row for each kind of prompt and method."""
    loop, order = LlamaLoop(model), random.Random(0)
    timed = dict[str, list[Mapping[str, Seconds]]]()
    n_tokens, recomputed = dict[str, list[int]](), dict[tuple[str, str], list[float]]()
    document = asked[0].question.documents[0][:400]
    short = replace(asked[0], question=replace(asked[0].question, documents=(document,)))
    _ask(model, loop, short, methods, order)  # warms up
    for one in tqdm(asked):
        seconds, answers = _ask(model, loop, one, methods, order)
        timed.setdefault(one.kind, []).append(seconds)
        for method, answer in answers.items():
            n_tokens.setdefault(one.kind, []).append(answer.report.prompt_tokens)
            share = answer.report.recompute_ratio
            recomputed.setdefault((one.kind, method), []).append(share)
    for kind, pairs in timed.items():
        theirs = [each[LOOP] for each in pairs]
        for method in methods:
            cpu, wall = ratios([each[method] for each in pairs], theirs)
            figures = (
                kind, len(pairs), round(median(n_tokens[kind])),
                spread([each.cpu for each in theirs]), method, cpu, wall,
                f"{median(recomputed[kind, method]):.3f}",
            )  # fmt: skip
            yield dict(zip(COLUMNS, figures, strict=True))


def _ask(
    model: LlamaCppModel, loop: LlamaLoop, one: Asked, methods: Sequence[str], order: random.Random
) -> tuple[dict[str, Seconds], dict[str, Answer]]:
    """What each way takes for one question, and the answers of the methods."""
    question, answers = one.question, dict[str, Answer]()
    chunks = list(question.documents)
    with TemporaryDirectory() as folder:
        engine = Engine(model, ChunkStore(folder))
        engine.cache_chunks(chunks)
        prompt = question.prompt(chat=model.has_chat_template)
        ids = model.tokenize_prompt(engine.render(prompt))

        def ours(method: str) -> None:
            engine.sequences.clear()
            answers[method] = engine.generate(prompt, chunks, method=method, max_new_tokens=1)

        ways: dict[str, Callable[[], object]] = {LOOP: partial(loop.answer, ids, 1)}
        ways |= {method: partial(ours, method) for method in methods}
        return taking_turns(ways, order), answers
