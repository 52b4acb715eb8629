"""Whether prompts that are made of a user's own chunks tell how much a model needs recomputed.

    python -m benchmarks need --model MODEL --questions FILE@5 --output RUN

Each prompt asks something of a chunk that stands among others; no labels are needed. A row holds,
for a method, how far its first token's distribution is from full prefill's (KL in nats), the same
along the tokens of an answer, and the log probability of these tokens. The answer is the right one
where the chunk tells it, else full prefill's own. A run that was interrupted goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.commands import TRUTH, command_line, loaded_model, markdown_table
from benchmarks.datasets import Question
from benchmarks.journal import Journal
from benchmarks.question_sets import Asked, questions_of
from benchmarks.right_answers import Candidate, Judged, entropy, kl
from samkv_integrations.cli.formatting import commit
from samkv_integrations.engine import Engine
from samkv_integrations.plan.request import Request
from samkv_integrations.runtimes.base import Observer, Runtime
from samkv_integrations.serving.alone import decode_greedily, force
from samkv_integrations.serving.first_token import first_token
from samkv_integrations.store.memory import MemoryStore

DEFAULT_METHODS = "reuse,epic first=4,epic first=8,epic,auto"
GIVEN, ASKED_FOR = 6, 6
"""Words that a prompt quotes, and words that it asks for."""
FOLLOWED = 8
FORMS = ("following", "cloze", "about")
"""The words that follow on quoted ones; a gap in a quoted sentence; what a text says."""


def prompts_of(chunks: Sequence[str], size: int, most: int, seed: int) -> list[Asked]:
    """Prompts over ``size`` chunks each, drawn by ``seed``; every form asks of the same chunks."""
    draw = Random(seed)
    drawn = draw.sample(list(chunks), len(chunks))
    found: list[Asked] = []
    for number, first in enumerate(range(0, len(drawn) - size + 1, size)):
        some = tuple(drawn[first : first + size])
        words = (text := draw.choice(some)).split()
        if len(words) < 3 * (GIVEN + ASKED_FOR):
            continue
        at = draw.randrange(len(words) // 4, len(words) - GIVEN - ASKED_FOR)
        given, follow = words[at : at + GIVEN], words[at + GIVEN : at + GIVEN + ASKED_FOR]
        gap = [*given, "...", *follow[2:]]
        name = " ".join(sorted(re.findall(r"\w{4,}", text), key=len)[-1:]) or words[at]
        questions = {
            "following": (f"Which words follow \"{' '.join(given)}\"? Answer with the words only.",
                          " ".join(follow)),
            "cloze": (
                f"Which words are missing in \"{' '.join(gap)}\"? Answer with the words only.",
                " ".join(follow[:2]),
            ),
            "about": (f"What do the documents say about {name}?", ""),
        }  # fmt: skip
        for form in FORMS:
            question, answer = questions[form]
            one = Question(
                id=f"{seed}-{number}-{form}", question=question, kind=form, documents=some,
                answers=(answer,) if answer else (), max_new_tokens=2 * FOLLOWED,
            )  # fmt: skip
            found.append(Asked(question=one, kind=form, half="choose", can_be_copied=True))
        if len(found) == most * len(FORMS):
            break
    return found


def need(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or 'smollm2'.")],
    questions: Annotated[
        list[str], typer.Option(help="FILE[@FORM][:FIRST-LAST], whose chunks are taken.")
    ],
    methods: Annotated[
        str, typer.Option(help="METHOD [FIELD=VALUE ...], with commas between.")
    ] = DEFAULT_METHODS,
    prompts: Annotated[int, typer.Option(help="Prompts of each form.")] = 20,
    size: Annotated[int, typer.Option(help="Chunks of a prompt.")] = 4,
    seed: Annotated[int, typer.Option(help="Draws the chunks.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of a model that transformers runs.")] = "bfloat16",
    runtime: Annotated[
        str, typer.Option(help="What runs the model, such as llama_cpp.")
    ] = "transformers",
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(".samkv/need"),
) -> None:
    """How far methods are from full prefill on prompts made of chunks."""
    labels = [TRUTH, *(each.strip() for each in methods.split(","))]
    texts = [text for each in questions_of(questions) for text in each.question.documents]
    asked = prompts_of(list(dict.fromkeys(texts)), size, prompts, seed)
    loaded = loaded_model(model, "auto", dtype, runtime)
    settings = {"model": re.split(r"[/\\]", model)[-1], "dtype": loaded.dtype_name}
    settings |= {"questions": questions, "size": size}
    with Journal(output, settings) as journal:
        _measure(loaded, journal, asked, [Candidate.of(label) for label in labels])
        rows = list(journal.rows.values())
    columns = ("form", "method", "prompts", "KL first", "KL along", "log p of the answer", "same")
    cells = [
        [form, label, str(len(mine)), *(f"{fmean(row[name] for row in mine):.3f}"
         for name in ("kl_first", "kl_along", "log_p", "same_first"))]
        for form in FORMS for label in labels
        if (mine := [r for r in rows if r["form"] == form and r["label"] == label])
    ]  # fmt: skip
    typer.echo(markdown_table(columns, cells, left=2))


def _measure(
    model: Runtime, journal: Journal, asked: Sequence[Asked], candidates: Sequence[Candidate]
) -> None:
    first = Engine(model, prefix_bytes=0)
    for one in tqdm(asked, desc="asking"):
        if all((one.question.id, each.label) in journal.rows for each in candidates):
            continue
        engine = Engine(model, MemoryStore(), scheduler=first.scheduler, prefix_bytes=0)
        judged, text = Judged(engine, one), "".join(one.question.answers)
        follow = (
            model.tokenize(text, special=False)[:FOLLOWED]
            if text
            else judged.asked_of(candidates[0], _answer)
        )
        along = partial(force, follow=follow)
        full: Tensor | None = None
        for candidate in candidates:
            made, report = judged.asked_of(candidate, along)
            logits = torch.as_tensor(made)
            full = logits if full is None else full
            far = kl(full, logits)
            chosen = logits[:-1].double().log_softmax(-1)[range(len(follow)), follow]
            if (one.question.id, candidate.label) not in journal.rows:
                journal.add({
                    "id": one.question.id, "label": candidate.label, "form": one.kind,
                    "kl_first": float(far[0]), "kl_along": float(far.mean()),
                    "log_p": float(chosen.mean()), "entropy_first": float(entropy(logits[0])),
                    "same_first": float(logits[0].argmax() == full[0].argmax()),
                    "prompt_tokens": report.prompt_tokens,
                    "recomputed": round(report.recompute_ratio, 4), "commit": commit(),
                })  # fmt: skip


def _answer(request: Request) -> list[int]:
    """The first tokens of its greedy answer."""
    first = first_token(request, Observer())
    with closing(first.sequence):
        return decode_greedily(request, first, FOLLOWED)[0]


app = command_line(need)
main = app
