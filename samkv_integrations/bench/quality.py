"""How well methods answer: the same questions over the same chunks, killed and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
import torch
from tqdm.auto import tqdm

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.scoring import require_extras, scores
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.attention_stats import MIN_CHUNKS
from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra
from samkv_integrations.figures import commit, version
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.finder import find_given
from samkv_integrations.prompt.split import ChunkHandle, PlainText, split_prompt

ALL = "all"
"""The ``kind`` of a row over every kind."""

ROWS, RUN = "rows.jsonl", "run.json"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. Two runs of equal plans on equal machines give equal answers.

    variants: label -> what answers. most: questions to ask, None for all. max_tokens: a longer
        prompt is left out, as is one that the model's window does not hold with its answer.
    answerable: leave out what full prefill does not answer exactly; it must be a variant then.
    block_size: tokens a block; None for what suits the questions' chunks.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    chat: bool = False
    most: int | None = None
    max_tokens: int | None = None
    answerable: bool = False
    block_size: int | None = None
    store_bits: int = DEFAULT_STORE_BITS

    def __post_init__(self) -> None:
        for name in ("most", "max_tokens", "block_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        check_store_bits(self.store_bits)
        if self.answerable and TRUTH not in self.variants:
            raise InvalidOption(f"answerable questions need {TRUTH!r} among the methods")

    def require_extras(self) -> None:
        """Raise MissingExtra if a package that the scores take is not installed."""
        interval([0.0])
        for language in {question.language for question in self.questions}:
            require_extras(language)

    def settings(self, model: Model) -> dict[str, Any]:
        """Everything that the rows of a run depend on, as JSON-able values."""
        return {
            **common_settings(model, self.questions, self.variants),
            "data_sets": sorted({q.dataset for q in self.questions}),
            "prompts": sorted(
                {"rag" if q.context is None else "longbench" for q in self.questions}
            ),
            "chat": self.chat,
            "questions": self.most,
            "max_tokens": self.max_tokens,
            "answerable": self.answerable,
            "block_size": self.block_size,
            "store_bits": self.store_bits,
        }


def common_settings(
    model: Model, questions: Sequence[Question], variants: Mapping[str, Variant]
) -> dict[str, Any]:
    """What every run over questions depends on, as JSON-able values."""
    text = json.dumps([asdict(q) for q in questions], ensure_ascii=False)
    return {
        "model": model.name,
        "weights": model.weights_digest,
        "tokenizer": model.tokenizer_digest,
        "data": hashlib.sha256(text.encode()).hexdigest(),
        "variants": {label: v.describe() for label, v in variants.items()},
        "version": version(),
        "commit": commit(),
        "hardware": hardware(model),
    }


def hardware(model: Model) -> dict[str, Any]:
    """What computed: names of processor and device, threads, torch, dtype."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    on_gpu = model.device.type == "cuda"
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else str(model.device),
        "dtype": model.dtype_name,
    }


def digest(settings: Mapping[str, Any]) -> str:
    """12 hex digits that name a run."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class Journal:
    """The folder of a run: what it measures, and a line for every answer as soon as it is there.

    ``rows`` holds the answers of this and of earlier processes under (question id, label).

    Raises InvalidOption if the folder belongs to a run of other settings, or is not writable.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        self.rows: dict[tuple[str, str], Row] = {}
        self._out: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim(json.loads(json.dumps(settings)), fresh)
        except OSError as error:
            raise InvalidOption(f"{folder} cannot be written ({error}); name another") from error

    def _claim(self, settings: Mapping[str, Any], fresh: bool) -> None:
        run, rows = self.folder / RUN, self.folder / ROWS
        if fresh:
            rows.unlink(missing_ok=True)
            run.unlink(missing_ok=True)
        if run.exists():
            self._refuse_other(settings, run)
            self._read(rows)
        elif rows.exists():
            raise InvalidOption(f"{self.folder} has {ROWS} but no {RUN}; name another folder")
        else:
            # whole or not at all: a process that is killed here leaves no half file behind
            made = run.with_suffix(".tmp")
            made.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", "utf-8")
            made.replace(run)

    def _refuse_other(self, settings: Mapping[str, Any], run: Path) -> None:
        try:
            found = json.loads(run.read_text(encoding="utf-8"))
            differ = sorted(k for k in {*found, *settings} if found.get(k) != settings.get(k))
        except (ValueError, TypeError) as error:
            raise InvalidOption(f"{run} is broken ({error}); --fresh starts over") from error
        if differ:
            raise InvalidOption(
                f"{self.folder} holds a run of another {', '.join(differ)}; name another folder "
                "with --output, or drop what it holds with --fresh"
            )

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a process was killed while it wrote this line
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], start=1):
            try:
                row = json.loads(line)
                self.rows[row["id"], row["label"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidOption(
                    f"{path}, line {number} is broken ({error!r}); --fresh starts over"
                ) from error

    def add(self, row: Row) -> None:
        """Keep a row, here and in the file."""
        if self._out is None:
            self._out = (self.folder / ROWS).open("a", encoding="utf-8", newline="\n")
        self._out.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._out.flush()
        self.rows[row["id"], row["label"]] = row

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._out is not None:
            self._out.close()


@dataclass(kw_only=True)
class Result:
    """Rows of the questions that count, and how many do not.

    too_long: left out because of their length. not_answered: not answered by full prefill.
    """

    rows: list[Row] = field(default_factory=list)
    too_long: int = 0
    not_answered: int = 0


def run(plan: Plan, model: Model, journal: Journal) -> Result:
    """Answer whatever the journal does not hold yet. Progress goes to standard error.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    fitting = list(islice(_fitting(plan, model, result), None if plan.answerable else plan.most))
    if fitting:
        most = min(plan.most or len(fitting), len(fitting))
        total = most * len(plan.variants)
        with tqdm(total=total, initial=len(journal.rows), desc="asking", unit="answer") as bar:
            _ask_all(plan, _Asker(plan, model, journal, fitting, bar), most, result, bar)
    if not result.rows:
        raise EmptyInput(
            f"no question is left: {result.too_long} of {len(plan.questions)} are too long, "
            f"{result.not_answered} are not answered by full prefill"
        )
    return result


def _ask_all(plan: Plan, asker: _Asker, most: int, result: Result, bar: tqdm[Any]) -> None:
    n_asked = 0
    for question in asker.questions:
        if n_asked == most:
            break
        if plan.answerable:
            (truth,) = asker.answer(question, [TRUTH])
            if not truth["exact_match"]:
                result.not_answered += 1
                bar.total += 1
                continue
        result.rows += asker.answer(question, list(plan.variants))
        n_asked += 1


def _fitting(plan: Plan, model: Model, result: Result) -> Iterator[Question]:
    for question in plan.questions:
        n_tokens = prompt_tokens(model, question, chat=plan.chat)
        room = model.context_window - question.max_new_tokens
        if n_tokens > min(room, plan.max_tokens or room):
            result.too_long += 1
        else:
            yield question


def prompt_tokens(model: Model, question: Question, *, chat: bool = False) -> int:
    """Tokens of a question's prompt, its documents counted as the chunks that they are."""
    return len(prompt_ids(model, question, chat=chat))


def prompt_ids(model: Model, question: Question, *, chat: bool = False) -> list[int]:
    """Token ids of a question's prompt, its documents tokenised as the chunks that they are."""
    prompt = question.prompt(chat=chat)
    text = prompt if isinstance(prompt, str) else model.render_chat(prompt)
    ids: list[int] = []
    for piece in split_prompt(text, find_given(text, question.documents)):
        assert not isinstance(piece, ChunkHandle)
        ids += model.tokenize(piece.text, special=isinstance(piece, PlainText))
    bos = model.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


class Shelf:
    """Chunk caches of one question at a time: no answer depends on what was asked before.

    A run that is gone on with would differ otherwise: in bfloat16 a chunk's cache depends a little
    on the chunks that it was prefilled with, and the stable layers on all chunks of the store. So
    the store holds, besides a question's own chunks, the first `MIN_CHUNKS` chunks of all (only if
    stable layers are wanted), and no more.
    """

    def __init__(
        self,
        model: Model,
        questions: Sequence[Question],
        variants: Mapping[str, Variant],
        block_size: int | None = None,
        store_bits: int = DEFAULT_STORE_BITS,
    ) -> None:
        self._model, self._store_bits = model, store_bits
        self._store = MemoryStore()
        chunks = list(dict.fromkeys(chunk for q in questions for chunk in q.documents))
        lengths = sorted(len(model.tokenize(c, special=False)) for c in chunks[:MIN_CHUNKS])
        self._block_size = block_size or BlockScheme.auto(lengths[len(lengths) // 2]).size
        self._calibration = (
            chunks[:MIN_CHUNKS]
            if any("statistics" in v.method.needs for v in variants.values())
            else []
        )

    @contextmanager
    def engine(self, question: Question) -> Iterator[Engine]:
        """An engine that holds the chunks of ``question``."""
        engine = Engine(
            self._model, self._store, block_size=self._block_size, store_bits=self._store_bits
        )
        shared = engine.cache_chunks(self._calibration)
        own = engine.cache_chunks(question.documents)
        yield engine
        for key in set(own) - set(shared):
            self._store.delete(key)


class _Asker:
    """Answers questions, each over its own chunks."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        journal: Journal,
        questions: Sequence[Question],
        bar: tqdm[Any],
    ) -> None:
        self.questions = questions
        self._plan, self._journal, self._bar = plan, journal, bar
        self._shelf = Shelf(model, questions, plan.variants, plan.block_size, plan.store_bits)
        self._is_warm = False

    def answer(self, question: Question, labels: Sequence[str]) -> list[Row]:
        """A row for each label, out of the journal or new."""
        missing = [name for name in labels if (question.id, name) not in self._journal.rows]
        if missing:
            with self._shelf.engine(question) as engine:
                if not self._is_warm:  # a process's first pass through anything is slower
                    for label in self._plan.variants:
                        self._ask(engine, question, label, 1)
                    self._is_warm = True
                for label in missing:
                    self._bar.set_postfix_str(label, refresh=False)
                    self._journal.add(self._ask(engine, question, label, question.max_new_tokens))
                    self._bar.update()
        return [self._journal.rows[question.id, label] for label in labels]

    def _ask(self, engine: Engine, question: Question, label: str, n_tokens: int) -> Row:
        variant = self._plan.variants[label]
        answer = engine.generate(
            question.prompt(chat=self._plan.chat),
            question.documents,
            method=variant.method,
            eviction=variant.eviction or "none",
            max_new_tokens=n_tokens,
        )
        text = answer.text.strip()
        return {
            "label": label,
            "id": question.id,
            "dataset": question.dataset,
            "kind": question.kind,
            "documents": len(question.documents),
            "question": question.question,
            "answer": text,
            "expected": list(question.answers),
            **scores(text, question.answers, question.language),
            **answer.report.to_dict(),
        }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean (2,000 resamples, fixed seed)."""
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtra.of("scipy", "bench") from error
    if len(set(values)) < 2:  # nothing to resample
        return values[0], values[0]
    found = bootstrap(
        (values,), np.mean, n_resamples=2_000, vectorized=True, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row for each (label, kind, documents), and for the totals over either and both.

    kind `ALL` and documents None stand for all. Scores, shares and bytes are means, times and
    ``ttft_ratio`` medians over questions. With `recompute` among the labels, also the share of
    questions whose answer is the same as its.
    """
    groups: dict[tuple[str, str, int | None], list[Mapping[str, Any]]] = {}
    truth: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        label, kind, documents = row["label"], row["kind"], row["documents"]
        for place in dict.fromkeys(
            [(ALL, None), (kind, None), (ALL, documents), (kind, documents)]
        ):
            groups.setdefault((label, *place), []).append(row)
        if label == TRUTH:
            truth[row["id"]] = row
    kinds = list(dict.fromkeys([ALL, *(kind for _, kind, _ in groups)]))
    order = sorted(groups, key=lambda g: (kinds.index(g[1]), g[2] or 0))
    return [_summary(groups[name], name, truth) for name in order]


_NOT_MEANS = ("documents", "rouge_l")


def _summary(
    group: Sequence[Mapping[str, Any]],
    name: tuple[str, str, int | None],
    truth: Mapping[str, Mapping[str, Any]],
) -> Row:
    label, kind, documents = name
    line: Row = {"label": label, "kind": kind, "documents": documents, "questions": len(group)}
    line["dataset"] = ", ".join(sorted({row["dataset"] for row in group}))
    for key in ("method", "eviction", "model"):
        line[key] = group[0][key]
    for score in ("f1", "exact_match"):
        values = [row[score] for row in group]
        line[score] = fmean(values)
        line[f"{score}_low"], line[f"{score}_high"] = interval(values)
    if all("rouge_l" in row for row in group):
        line["rouge_l"] = fmean(row["rouge_l"] for row in group)
    for key, value in group[0].items():
        if key not in line and key not in _NOT_MEANS and isinstance(value, int | float):
            middle = median if key.endswith("_s") else fmean
            line[key] = middle([row[key] for row in group])
    line["chunk_misses"] = sum(sum(row["chunk_misses"].values()) for row in group)
    if all(row["id"] in truth for row in group):
        pairs = [(row, truth[row["id"]]) for row in group]
        line["same_as_recompute"] = fmean(row["answer"] == full["answer"] for row, full in pairs)
        line["ttft_ratio"] = median(row["ttft_s"] / full["ttft_s"] for row, full in pairs)
    return line
