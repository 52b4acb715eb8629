"""Right answers of every method, of all questions that were asked, and what they cost.

    python -m benchmarks right_answers --model MODEL --data FOLDER --output RUN

A run that was interrupted goes on. First tokens are timed in CPU seconds, which other work on the
machine changes little on one thread (OMP_NUM_THREADS=1), and in wall seconds, which a user waits;
on all cores of an idle machine (OMP_NUM_THREADS unset) these show what threads gain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar
from zlib import crc32

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.commands import TRUTH, command_line, loaded_model
from benchmarks.journal import Journal
from benchmarks.question_sets import ANSWER_TOKENS, PACKAGES, STANDARD, Asked, questions_of
from benchmarks.right_table import summarise, table
from benchmarks.run_settings import hardware
from samkv_integrations.cli.formatting import Row, commit
from samkv_integrations.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.evaluation import is_right
from samkv_integrations.methods import Method, get_method
from samkv_integrations.methods.base import option_names, with_option
from samkv_integrations.options import AnswerSettings, Sampling
from samkv_integrations.plan.request import Request
from samkv_integrations.runtimes.base import Observer, Runtime
from samkv_integrations.serving.alone import force
from samkv_integrations.serving.first_token import first_token
from samkv_integrations.store.disk import ChunkStore

_Made = TypeVar("_Made")

TIMED_EVERY = 16
"""Of so many questions one has its answers decoded alone, to be timed, and KL along."""
FOLLOWED = 8
"""Tokens of full prefill's answer along which KL is measured."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way of answering."""

    label: str
    method: Method
    eviction: str = "none"

    @classmethod
    def of(cls, label: str) -> Candidate:
        """From ``METHOD [FIELD=VALUE ...]``, such as ``epic first=4 eviction=quest``."""
        name, *settings = label.split()
        method, eviction = get_method(name), "none"
        for setting in settings:
            field, _, value = setting.partition("=")
            if field == "eviction":
                eviction = value
                continue
            known = [each for each in option_names(method) if each.split(".")[1] == field]
            if not known:
                raise InvalidOption(f"{label!r}: {name} has no {field!r}; {option_names(method)}")
            method = with_option(method, f"{known[0]}={value}")
        return cls(label=label, method=method, eviction=eviction)


class Judged:
    """One question, its chunks cached, as every candidate answers it."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        self.engine, self.asked, self.question = engine, asked, asked.question
        self.model, self._documents = engine.model, list(asked.question.documents)
        self._prompt = self.question.prompt(chat=engine.model.has_chat_template)
        engine.cache_chunks(self._documents)

    def asked_of(self, candidate: Candidate, work: Callable[[Request], _Made]) -> _Made:
        """What ``work`` makes of the request, in the model's thread."""
        engine = self.engine
        with engine.resolve(self._prompt, self._documents) as resolved:
            settings = AnswerSettings.of(
                method=candidate.method, eviction=candidate.eviction, on_miss="text"
            )
            request = engine.request(resolved, settings, capacity=self.question.max_new_tokens)
            return engine.scheduler.run(lambda _: work(request))

    def rows(self, candidates: Sequence[Candidate], *, is_timed: bool) -> list[Row]:
        """A row for each candidate, the first being full prefill."""
        answers = [self.asked_of(each, partial(_Answer, each.label)) for each in candidates]
        run, gold = self.engine.scheduler.run, self.question.answers
        decoded = partial(_decode, most=self.question.max_new_tokens)
        if is_timed:
            for answer in answers:
                run(lambda _, alone=[answer]: decoded(alone, is_enough=lambda _: False))
        else:
            run(lambda _: decoded(answers, is_enough=lambda one: is_right(one.text, gold)))
        full, rows = answers[0], [answer.row(self.asked) for answer in answers]
        for answer in answers:
            answer.sequence.close()
        for row, answer in zip(rows, answers, strict=True):
            row["kl_first"] = float(kl(full.logits[None], answer.logits[None])[0])
            row["entropy_first"] = float(entropy(answer.logits))
        if is_timed:
            along = partial(force, follow=full.tokens[:FOLLOWED])
            theirs = _tensor(self.asked_of(candidates[0], along)[0])
            for row, candidate in zip(rows, candidates, strict=True):
                mine = _tensor(self.asked_of(candidate, along)[0])
                row["kl_along"] = float(kl(theirs, mine).mean())
        return rows


def _tensor(logits: Any) -> Tensor:
    """Logits of any runtime."""
    return torch.as_tensor(logits)


def kl(full: Tensor, other: Tensor) -> Tensor:
    """(n,) KL(full || other) in nats. Both arguments are logits (n, vocabulary)."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    share = theirs.exp()
    # 0 where full prefill's probability is 0, also if the other's is: 0 * inf is no number
    terms = torch.where(share > 0, share * (theirs - mine), 0.0)
    return terms.sum(-1).clamp_min(0)  # rounding may make it slightly negative


def entropy(logits: Tensor) -> Tensor:
    """The entropy in nats of the distribution of ``logits`` (vocabulary,)."""
    shares = logits.double().softmax(-1)
    return torch.special.entr(shares).sum()


class _Answer:
    """One answer while it is decoded."""

    def __init__(self, label: str, request: Request) -> None:
        self.label, self.model = label, request.model
        began, began_wall = time.process_time(), time.perf_counter()
        first = first_token(request, Observer())
        self.first_s = time.process_time() - began
        self.first_wall_s = time.perf_counter() - began_wall
        self.report, self.logits = first.report, _tensor(self.model.stacked([first.logits]))[0]
        self.sampler = self.model.sampler(request.resolved.token_ids, Sampling.of(), None)
        self.sequence = first.sequence
        self.tokens = [self.sampler.next(first.logits)]
        self.decode_s = 0.0
        self.is_whole = True

    @property
    def text(self) -> str:
        ends = self.model.end_ids(())
        return self.model.detokenize([t for t in self.tokens if t not in ends]).strip()

    def row(self, asked: Asked) -> Row:
        report = self.report
        return {
            "id": asked.question.id, "label": self.label, "kind": asked.kind,
            "half": asked.half, "can_be_copied": asked.can_be_copied, "text": self.text,
            "right": is_right(self.text, asked.question.answers),
            "first_s": round(self.first_s, 4), "first_wall_s": round(self.first_wall_s, 4),
            "threads": self.model.n_threads(),
            "decode_s": round(self.decode_s, 4) if self.is_whole else None,
            "tokens": len(self.tokens), "prompt_tokens": report.prompt_tokens,
            "recomputed": round(report.recompute_ratio, 4), "commit": commit(),
        }  # fmt: skip


def _decode(answers: Sequence[_Answer], most: int, is_enough: Callable[[_Answer], bool]) -> None:
    """The tokens of answers, together. Those of several are not timed."""
    ends = answers[0].model.end_ids(())
    began = time.process_time()
    going = list(answers)
    for answer in answers:
        answer.is_whole = len(answers) == 1
    while True:
        going = [
            each for each in going
            if each.tokens[-1] not in ends and len(each.tokens) < most and not is_enough(each)
        ]  # fmt: skip
        if not going:
            break
        last = [[each.tokens[-1]] for each in going]
        logits = answers[0].model.decode([each.sequence for each in going], last)
        for each, found in zip(going, logits, strict=True):
            each.tokens.append(each.sampler.next(found[0]))
    answers[0].decode_s = time.process_time() - began


# -- the command ------------------------------------------------------------------------------

DEFAULT_METHODS = "reuse,epic,auto"


def right_answers(
    model: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or 'smollm2'.")],
    questions: Annotated[
        list[str] | None, typer.Option(help="FILE[@FORM][:FIRST-LAST]; again for more.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of hotpotqa.jsonl and the others: the standard questions."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="METHOD [FIELD=VALUE ...], with commas between.")
    ] = DEFAULT_METHODS,
    half: Annotated[str, typer.Option(help="choose, report or all.")] = "all",
    most: Annotated[int | None, typer.Option(help="At most so many questions.")] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer.")
    ] = ANSWER_TOKENS,
    dtype: Annotated[str, typer.Option(help="Of a model that transformers runs.")] = "bfloat16",
    runtime: Annotated[
        str, typer.Option(help="What runs the model, such as llama_cpp.")
    ] = "transformers",
    store_bits: Annotated[
        int | None, typer.Option(help="Of caches; the runtime's own by default.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path(".samkv/right"),
) -> None:
    """Right answers of every method, of all questions that were asked, and what they cost."""
    labels = list(dict.fromkeys([TRUTH, *(each.strip() for each in methods.split(","))]))
    candidates = [Candidate.of(label) for label in labels]
    specs = list(questions or ())
    if data is not None:
        specs += [str(data / spec) for spec in STANDARD] + [str(PACKAGES)]
    if not specs:
        raise InvalidOption("no questions; give --questions FILE or --data FOLDER")
    if half not in ("choose", "report", "all"):
        raise InvalidOption(f"half={half!r}; allowed: choose, report, all")
    asked = [
        replace(each, question=replace(each.question, max_new_tokens=answer_tokens))
        for each in questions_of(specs)
        if half in (each.half, "all")
    ][:most]
    missing = sum(not each.can_be_copied for each in asked)
    typer.echo(
        f"{len(asked)} questions; the gold answer of {missing} stands in no chunk, and they count",
        err=True,
    )
    loaded = loaded_model(model, "auto", dtype, runtime)
    settings = {"model": re.split(r"[/\\]", model)[-1], "dtype": loaded.dtype_name}
    if runtime != "transformers":
        settings |= {"runtime": runtime, "build": loaded.build}
    if store_bits is not None:
        settings["store_bits"] = str(store_bits)
    if answer_tokens != ANSWER_TOKENS:
        settings["answer_tokens"] = str(answer_tokens)
    with Journal(output, settings) as journal:
        typer.echo(f"{hardware(loaded)}", err=True)
        _measure(loaded, journal, asked, candidates, store_bits)
        wanted = {each.question.id for each in asked}
        rows = [row for row in journal.rows.values() if row["id"] in wanted]
    typer.echo(table(summarise(rows, labels)))


def _measure(
    model: Runtime, journal: Journal, asked: Sequence[Asked], candidates: Sequence[Candidate],
    store_bits: int | None,
) -> None:  # fmt: skip
    first = Engine(model, prefix_bytes=0)
    for one in tqdm(asked, desc="asking"):
        missing = [each for each in candidates if (one.question.id, each.label) not in journal.rows]
        if not missing:
            continue
        is_timed = crc32(one.question.id.encode()) % TIMED_EVERY == 0
        # full prefill again, with which the others are compared
        asked_of = list(dict.fromkeys([candidates[0], *missing]))
        with TemporaryDirectory() as folder:
            engine = Engine(
                model, ChunkStore(folder), scheduler=first.scheduler, store_bits=store_bits,
                prefix_bytes=0,
            )  # fmt: skip
            judged = Judged(engine, one)
            for row in judged.rows(asked_of, is_timed=is_timed):
                if (row["id"], row["label"]) not in journal.rows:
                    journal.add(row)


app = command_line(right_answers)
main = app
