"""How well methods answer: the same questions over the same chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, cast

import typer
from tqdm.auto import tqdm

from benchmarks import commands as runs
from benchmarks import markdown, scoring, variants
from benchmarks import options as own
from benchmarks import plot as picture
from benchmarks.commands import command_line
from benchmarks.datasets import BUILTIN, SHORT, PromptStyle, Question, load
from benchmarks.journal import Journal
from benchmarks.question_caches import QuestionCaches
from benchmarks.run_settings import common_settings
from benchmarks.variants import ALL, TRUTH, Table4Row, Variant
from samkv_integrations import figures
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import loading
from samkv_integrations.engine.chunk_prefix import ChunkPrefix
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.measures import interval
from samkv_integrations.figures import Row
from samkv_integrations.model.model import Model


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What to measure. Two runs of equal configurations on equal machines give equal answers.

    variants: label -> what answers. most: questions to ask, None for all. max_tokens: a longer
        prompt is left out, as is one that exceeds the model's window together with its answer.
    answerable: questions that full prefill does not answer exactly are left out; it must be a
        variant then. block_size: tokens a block; None for what suits the questions' chunks.
    prefix: what chunks are prefilled after, as `Engine` takes it.

    Raises InvalidOption for a value that cannot be measured.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    chat: bool = False
    most: int | None = None
    max_tokens: int | None = None
    answerable: bool = False
    block_size: int | None = None
    store_bits: int = DEFAULT_STORE_BITS
    prefix: str = "documents"

    def __post_init__(self) -> None:
        counts = {"questions": self.most, "max_tokens": self.max_tokens}
        for name, value in {**counts, "block_size": self.block_size}.items():
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        check_store_bits(self.store_bits)
        if self.answerable and TRUTH not in self.variants:
            raise InvalidOption(f"answerable questions need {TRUTH!r} among the methods")

    def require_extras(self) -> None:
        """Raise MissingExtra if a package that the scores take is not installed."""
        for language in {question.language for question in self.questions}:
            scoring.require_extras(language)

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
            "prefix": ChunkPrefix.of(model, MemoryStore(), self.prefix, "").name,
        }


@dataclass(kw_only=True)
class Result:
    """Rows of the questions that count, and the numbers of those that do not.

    too_long: left out because of their length. not_answered: not answered by full prefill.
    """

    rows: list[Row] = field(default_factory=list)
    too_long: int = 0
    not_answered: int = 0


def run(config: QualityConfig, model: Model, journal: Journal) -> Result:
    """Answer every question that the journal does not hold. Progress goes to standard error.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    # how many of the fitting ones full prefill answers is only known once they are asked
    n_fitting = None if config.answerable else config.most
    fitting = list(islice(_fitting(config, model, result), n_fitting))
    if fitting:
        most = min(config.most or len(fitting), len(fitting))
        total = most * len(config.variants)
        with tqdm(total=total, initial=len(journal.rows), desc="asking", unit="answer") as bar:
            _ask_all(config, _Asker(config, model, journal, fitting, bar), most, result, bar)
    if not result.rows:
        raise EmptyInput(
            f"no question is left: {result.too_long} of {len(config.questions)} are too long, "
            f"{result.not_answered} are not answered by full prefill"
        )
    return result


def _ask_all(
    config: QualityConfig, asker: _Asker, most: int, result: Result, bar: tqdm[Any]
) -> None:
    n_asked = 0
    for question in asker.questions:
        if n_asked == most:
            break
        if config.answerable:
            (truth,) = asker.answer(question, [TRUTH])
            if not truth["exact_match"]:
                result.not_answered += 1
                bar.total += 1
                continue
        result.rows += asker.answer(question, list(config.variants))
        n_asked += 1


def _fitting(config: QualityConfig, model: Model, result: Result) -> Iterator[Question]:
    for question in config.questions:
        n_tokens = len(question.prompt_ids(model, chat=config.chat))
        room = model.context_window - question.max_new_tokens
        if n_tokens > min(room, config.max_tokens or room):
            result.too_long += 1
        else:
            yield question


class _Asker:
    """Answers questions, each over its own chunks."""

    def __init__(
        self,
        config: QualityConfig,
        model: Model,
        journal: Journal,
        questions: Sequence[Question],
        bar: tqdm[Any],
    ) -> None:
        self.questions = questions
        self._config, self._journal, self._bar = config, journal, bar
        self._caches = QuestionCaches(
            model, questions, config.variants, config.block_size, config.store_bits, config.prefix
        )
        self._is_warm = False

    def answer(self, question: Question, labels: Sequence[str]) -> list[Row]:
        """A row for each label, from the journal or new."""
        missing = [name for name in labels if (question.id, name) not in self._journal.rows]
        if missing:
            with self._caches.engine(question) as engine:
                if not self._is_warm:  # a process's first pass through anything is slower
                    for label in self._config.variants:
                        self._ask(engine, question, label, 1)
                    self._is_warm = True
                for label in missing:
                    self._bar.set_postfix_str(label, refresh=False)
                    self._journal.add(self._ask(engine, question, label, question.max_new_tokens))
                    self._bar.update()
        return [self._journal.rows[question.id, label] for label in labels]

    def _ask(self, engine: Engine, question: Question, label: str, n_tokens: int) -> Row:
        variant = self._config.variants[label]
        answer = engine.generate(
            question.prompt(chat=self._config.chat),
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
            **scoring.scores(text, question.answers, question.language),
            **answer.report.to_dict(),
        }


_NOT_MEANS = ("documents", "rouge_l")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """A row for each (label, kind, documents), and for the totals over either and both.

    kind `ALL` and documents None stand for all. Scores, shares and bytes are means, times and
    ``ttft_ratio`` medians over questions. With `recompute` among the labels, also the share of
    questions whose answer is the same as its.
    """
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    truth: dict[str, Row] = {}
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


def _summary(
    group: Sequence[Row],
    name: tuple[str, str, int | None],
    truth: Mapping[str, Row],
) -> Row:
    label, kind, documents = name
    line: dict[str, Any] = {
        "label": label,
        "kind": kind,
        "documents": documents,
        "questions": len(group),
    }
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


View = Literal["all", "ablation", "knobs", "table1", "table3"]
"""What is compared, and as which table it is shown; "all" is neither the paper's nor a study."""


def quality(
    model: args.ModelName = "builtin", device: args.Device = "auto", dtype: args.Dtype = "auto",
    block_size: own.BlockSize = None, store_bits: own.StoreBits = DEFAULT_STORE_BITS,
    prefix: own.Prefix = "documents",
    data: own.Data = None, builtin_set: own.BuiltinSet = None,
    questions: own.MostQuestions = None, kinds: own.Kinds = "",
    documents: own.DocumentCounts = "", max_tokens: own.MaxTokens = None,
    answerable: own.Answerable = False, prompt: own.Prompt = "auto", chat: args.Chat = False,
    max_new_tokens: own.AnswerTokens = None, methods: own.Methods = "",
    budgets: own.Budgets = "", recompute_ratios: own.RecomputeRatios = "",
    eviction: own.Evictions = "", ablation: own.Ablation = False, knobs: own.Knobs = False,
    table1: own.Table1 = False, table3: own.Table3 = False, output: own.RunFolder = None,
    fresh: own.Fresh = False, json_file: own.JsonFile = None, plot: own.Plot = None,
) -> None:  # fmt: skip
    """Answers of every method to the same questions over the same chunks."""
    view = _view(ablation=ablation, knobs=knobs, table1=table1, table3=table3)
    compared, table4_rows = _compared(view, methods, budgets, recompute_ratios, eviction)
    sources = _sources(data, builtin_set)
    _check_files(json_file, plot, compared)
    config = QualityConfig(
        questions=load(
            sources, builtin_set=builtin_set or SHORT,
            prompt=cast(PromptStyle, prompt),  # load refuses any other word
            kinds=loading.words(kinds), documents=loading.counts("--documents", documents),
            max_new_tokens=max_new_tokens,
        ),
        variants=compared, chat=chat, most=questions, max_tokens=max_tokens,
        answerable=answerable, block_size=block_size, store_bits=store_bits,
        prefix=prefix,
    )  # fmt: skip
    config.require_extras()
    loaded = runs.loaded_model(model, device, dtype)
    settings = config.settings(loaded)
    with runs.journal_of(output, settings, fresh=fresh) as journal:
        result = run(config, loaded, journal)
    rows = summarise(result.rows)
    _report_run(journal.folder, rows, result)
    if json_file:
        left_out = {"too_long": result.too_long, "not_answered": result.not_answered}
        more = {"hardware": settings["hardware"], "settings": settings, "left_out": left_out}
        runs.write(figures.to_json("benchmarks quality", model, rows, more), json_file)
    if plot:
        totals = [row for row in rows if row["kind"] == ALL and row["documents"] is None]
        picture.draw(totals, plot, f"{model}, {rows[0]['questions']} questions")
    if json_file != runs.STDOUT:
        typer.echo(figures.visible(_table(view, rows, result.rows, table4_rows)))


def _view(**wanted: bool) -> View:
    named = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(named) > 1:
        raise InvalidOption("--ablation, --knobs, --table1 and --table3: give at most one of them")
    return cast(View, named[0] if named else "all")


def _compared(
    view: View, methods: str, budgets: str, recompute_ratios: str, eviction: str
) -> tuple[dict[str, Variant], dict[str, Table4Row]]:
    """Label -> what answers; and label -> row of the paper's Table 4, empty for other views."""
    brings_methods = view in ("ablation", "knobs")
    if brings_methods and (methods or recompute_ratios or eviction):
        raise InvalidOption(
            "--ablation and --knobs bring their own methods; leave --methods, --recompute-ratios "
            "and --eviction out"
        )
    kept = loading.shares("--budgets", budgets)
    if view == "ablation":
        return variants.table4(kept)
    if view == "knobs":
        if kept:
            raise InvalidOption(f"--knobs with --budgets {budgets}; leave --budgets out")
        return variants.knobs(), {}
    names = runs.method_names(methods or "all")
    again = loading.shares("--recompute-ratios", recompute_ratios)
    return variants.combine(names, kept, again, variants.evictions_of(loading.words(eviction))), {}


def _sources(data: Sequence[str] | None, builtin_set: str | None) -> Sequence[str]:
    sources = data or [BUILTIN]
    if builtin_set is not None and BUILTIN not in sources:
        raise InvalidOption(
            f"--set {builtin_set} picks built-in questions, and --data {' --data '.join(sources)} "
            f"brings others; add --data {BUILTIN}, or leave --set out"
        )
    return sources


def _check_files(
    json_file: Path | None, plot: Path | None, compared: Mapping[str, Variant]
) -> None:
    """Raise before anything is measured if a file could not be written afterwards."""
    if plot:
        picture.check(plot)
        if TRUTH not in compared:
            raise InvalidOption(f"--plot shows shares of {TRUTH!r}; add it to --methods")
    for file in (json_file, plot):
        runs.require_folder(file)


def _report_run(folder: Path, rows: Sequence[Row], result: Result) -> None:
    typer.echo(
        f"{folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long, "
        f"{result.not_answered} not answered by full prefill",
        err=True,
    )


def _table(
    view: View, rows: Sequence[Row], answers: Sequence[Row], table4_rows: Mapping[str, Table4Row]
) -> str:
    """The markdown of a view. rows: summaries. answers: what they summarise."""
    if view == "table1":
        return markdown.table1(rows)
    if view == "table3":
        return markdown.table3(answers)
    if view == "ablation":
        return markdown.table4(answers, table4_rows)
    return markdown.quality(rows)


app = command_line(quality)


def main() -> None:
    """Run the benchmark as the command line says."""
    app(prog_name="python -m benchmarks quality")


if __name__ == "__main__":
    main()
