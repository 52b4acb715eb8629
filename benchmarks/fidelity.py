"""How far methods are from full prefill on real paragraphs: the same tokens forced on each."""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, cast, get_args

import torch
import typer
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from benchmarks import commands as runs
from benchmarks import fidelity_plot, markdown, variants
from benchmarks import options as own
from benchmarks import plot as picture
from benchmarks.commands import command_line
from benchmarks.datasets import BUILTIN, DATA, Question, load, neighbour_questions, with_fewer
from benchmarks.divergence import DIVERGENCES, MEASURES, OF_REFERENCE, Forced, measure
from benchmarks.journal import Journal
from benchmarks.question_caches import QuestionCaches
from benchmarks.run_settings import common_settings
from benchmarks.variants import ALL, TRUTH, Variant
from samkv_integrations import figures
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import loading
from samkv_integrations.cli.ingest import Found, find_documents, read_chunks
from samkv_integrations.documents import SUFFIXES
from samkv_integrations.engine.decode import ForcedTokens, force
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.errors import EmptyInput, InvalidOption, UnknownOption
from samkv_integrations.evaluation.measures import interval, ratio_interval
from samkv_integrations.figures import Row, visible
from samkv_integrations.methods import METHODS
from samkv_integrations.model.model import Model

Part = Literal["choose", "report", "all"]

QUESTIONS = DATA / "fidelity" / "questions.jsonl"


def part_of(question_id: str) -> Part:
    """The half that a question belongs to, the same for ever.

    Settings are chosen on one half, and figures are reported on the other.
    """
    is_odd = hashlib.sha256(question_id.encode()).digest()[0] >> 4 & 1
    return "report" if is_odd else "choose"


def questions(part: Part = "report", n_documents: int = 10) -> list[Question]:
    """The questions of a half that come with the package, data sets taking turns.

    n_documents: most documents a question, see `with_fewer`.
    """
    found = of_part(load([str(QUESTIONS)], prompt="rag"), part)
    return [with_fewer(question, n_documents) for question in found]


def of_part(found: Sequence[Question], part: Part) -> list[Question]:
    """The questions of a half. Raises UnknownOption for an unknown one."""
    if part not in get_args(Part):
        raise UnknownOption.among("part", part, get_args(Part))
    return [question for question in found if part in ("all", part_of(question.id))]


@dataclass(frozen=True, kw_only=True)
class FidelityConfig:
    """What to measure. Two runs of equal configurations on equal machines give equal figures.

    variants: label -> what is measured; full prefill is among them. tokens: most tokens of full
        prefill's answer that are forced on all. past_end: go on where that answer ends, with the
        likeliest token that does not end it. most: questions to ask, None for all. store_bits: of
        variants that name none. floor: measure full prefill in the other dtype too, see
        `measure_floor`.

    Raises InvalidOption for a value that cannot be measured.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    tokens: int = 32
    past_end: bool = False
    chat: bool = False
    most: int | None = None
    store_bits: int = DEFAULT_STORE_BITS
    floor: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("questions", self.most)):
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        for bits in self._all_bits():
            check_store_bits(bits)
        if TRUTH not in self.variants:
            raise InvalidOption(f"figures are distances from {TRUTH!r}; it must be a variant")

    def _all_bits(self) -> list[int]:
        return [self.bits_of(label) for label in self.variants]

    def bits_of(self, label: str) -> int:
        """Bits of the caches that a variant is given, whether or not it reads them."""
        bits = self.variants[label].store_bits
        return self.store_bits if bits is None else bits

    def settings(self, model: Model) -> dict[str, Any]:
        """Everything that the rows of a run depend on, as JSON-able values."""
        return {
            **common_settings(model, self.questions, self.variants),
            "tokens": self.tokens,
            "past_end": self.past_end,
            "chat": self.chat,
            "questions": self.most,
            "store_bits": self.store_bits,
            "floor": other_dtype(model) if self.floor else None,
        }

    def expected(self, model: Model, question: Question) -> list[int]:
        """Token ids of a question's first reference answer after its prompt; none if unknown."""
        if not question.answers:
            return []
        answer = question.answers[0]
        return model.tokenize(answer if self.chat else f" {answer}", special=False)


@dataclass(kw_only=True)
class Result:
    """Rows of the ``asked`` questions. too_long: how many were left out because of their length."""

    asked: Sequence[Question] = ()
    rows: list[Row] = field(default_factory=list)
    too_long: int = 0


def other_dtype(model: Model) -> str:
    """The dtype that the floor of a model is measured in: float32, or bfloat16 for such a one."""
    return "bfloat16" if model.dtype_name == "float32" else "float32"


def floor_label(dtype: str) -> str:
    """The label of full prefill in another dtype."""
    return f"{TRUTH}, {dtype}"


def run(
    config: FidelityConfig, model: Model, journal: Journal, truths: TruthFiles | None = None
) -> Result:
    """Measure every row that the journal does not hold. Progress goes to standard error.

    truths: where full prefill's logits are kept for `measure_floor`, of questions that lack it.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    result.asked = list(islice(_fitting(config, model, result), config.most))
    if not result.asked:
        raise EmptyInput(
            f"no question is left: all {len(config.questions)} are too long for the context window "
            f"of {model.name!r}; allow fewer documents"
        )
    caches = {
        bits: QuestionCaches(model, result.asked, _in_bits(config, bits), store_bits=bits)
        for bits in dict.fromkeys(config.bits_of(label) for label in config.variants)
    }
    floor = floor_label(other_dtype(model))
    held = sum((q.id, label) in journal.rows for q in result.asked for label in config.variants)
    total = len(result.asked) * len(config.variants)
    with tqdm(total=total, initial=held, desc="measuring", unit="row") as bar:
        for question in result.asked:
            missing = [
                label for label in config.variants if (question.id, label) not in journal.rows
            ]
            wanted = (
                truths
                if truths and (question.id, floor) not in journal.rows
                and not truths.has(question.id) else None
            )  # fmt: skip
            if missing or wanted:
                for row in _rows(config, caches, question, missing, wanted):
                    journal.add(row)
                    bar.update()
    result.rows = [journal.rows[q.id, label] for q in result.asked for label in config.variants]
    return result


def _in_bits(config: FidelityConfig, bits: int) -> dict[str, Variant]:
    return {label: v for label, v in config.variants.items() if config.bits_of(label) == bits}


def measure_floor(
    config: FidelityConfig, model: Model, journal: Journal, truths: TruthFiles, result: Result
) -> None:
    """Add to ``result`` how far full prefill is from itself in another dtype, after full prefill.

    model: the one of `run` in that dtype, which may be loaded after the other is gone. Its logits
    are compared along the same tokens, which ``truths`` holds. Differences below are none of
    methods.
    """
    label = floor_label(model.dtype_name)
    caches = QuestionCaches(
        model, result.asked, {TRUTH: config.variants[TRUTH]}, store_bits=config.store_bits
    )
    missing = [q for q in result.asked if (q.id, label) not in journal.rows]
    for question in tqdm(missing, desc=label, unit="row"):
        own, truth = truths.read(question.id)
        with caches.engine(question) as engine:
            other = _forced(config, engine, question, TRUTH, own, truth.expected)
        journal.add(_row(config, model, question, TRUTH, own, truth, other) | {"label": label})
        truths.discard(question.id)
    truths.close()
    rows: list[Row] = []
    for row in result.rows:
        rows.append(row)
        if row["label"] == TRUTH:
            rows.append(journal.rows[row["id"], label])
    result.rows = rows


def _fitting(config: FidelityConfig, model: Model, result: Result) -> Iterator[Question]:
    for question in config.questions:
        n_forced = max(config.tokens, len(config.expected(model, question)))
        if len(question.prompt_ids(model, chat=config.chat)) + n_forced > model.context_window:
            result.too_long += 1
        else:
            yield question


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What one variant says of a question, and the share of its context that it computed."""

    forced: Forced
    recompute_ratio: float


def _rows(
    config: FidelityConfig,
    caches: Mapping[int, QuestionCaches],
    question: Question,
    labels: Sequence[str],
    truths: TruthFiles | None,
) -> Iterator[Row]:
    """A row for each label. truths: where full prefill's logits are to be kept."""
    full: _Measured | None = None
    own: list[int] = []
    for bits, of_question in caches.items():
        wanted = [label for label in labels if config.bits_of(label) == bits]
        if not wanted and (full or not truths):
            continue
        with of_question.engine(question) as engine:
            model = engine.model
            if full is None:
                own = _own_answer(config, model, question)
                expected = tuple(config.expected(model, question))
                full = _forced(config, engine, question, TRUTH, own, expected)
                if truths:
                    truths.keep(question.id, own, full.forced)
            truth = full.forced
            for label in wanted:
                other = (
                    full if label == TRUTH
                    else _forced(config, engine, question, label, own, truth.expected)
                )  # fmt: skip
                yield _row(config, model, question, label, own, truth, other)


def _own_answer(config: FidelityConfig, model: Model, question: Question) -> list[int]:
    return greedy(
        model,
        question.prompt_ids(model, chat=config.chat),
        config.tokens,
        end_ids=() if config.past_end else model.eos_ids,
        never=model.eos_ids if config.past_end else (),
    )


def _row(
    config: FidelityConfig, model: Model, question: Question, label: str, own: Sequence[int],
    truth: Forced, other: _Measured,
) -> dict[str, Any]:  # fmt: skip
    variant = config.variants[label]
    return {
        "label": label,
        "id": question.id,
        "kind": question.dataset,
        "method": variant.method.name,
        "eviction": variant.eviction.name if variant.eviction else None,
        "store_bits": config.bits_of(label) if variant.method.recompute.uses_caches else None,
        "tokens": len(own),
        "answer": model.detokenize(own).strip(),
        "recompute_ratio": other.recompute_ratio,
        **measure(truth, other.forced),
    }


def _forced(
    config: FidelityConfig,
    engine: Engine,
    question: Question,
    label: str,
    own: Sequence[int],
    expected: tuple[int, ...],
) -> _Measured:
    """Logits of one variant. The last forced token is not fed: no logits after it are compared."""
    variant, prompt = config.variants[label], question.prompt(chat=config.chat)
    settings = AnswerSettings.of(
        method=variant.method, eviction=variant.eviction or "none", on_miss="text"
    )

    def along(tokens: Sequence[int]) -> ForcedTokens:
        with engine.resolve(prompt, question.documents) as resolved:
            request = engine.request(resolved, settings, len(tokens))
            return engine.scheduler.run(partial(force, request, tokens[:-1]))

    answered = along(own)
    return _Measured(
        forced=Forced(
            own=answered.logits,
            reference=along(expected).logits if expected else None,
            expected=expected,
        ),
        recompute_ratio=answered.report.recompute_ratio,
    )


def greedy(
    model: Model,
    ids: Sequence[int],
    n_tokens: int,
    *,
    end_ids: Collection[int] = (),
    never: Collection[int] = (),
) -> list[int]:
    """The likeliest tokens after ``ids``, by transformers' own forward pass.

    At most ``n_tokens``, the last of which may be one of ``end_ids``; none of ``never``.
    """
    found: list[int] = []
    fed, past = list(ids), None
    while len(found) < n_tokens and not (found and found[-1] in end_ids):
        with torch.inference_mode():
            output = model.hf(
                input_ids=torch.tensor([fed], device=model.device),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[0, -1]
            logits[list(never)] = -torch.inf
        past = output.past_key_values
        fed = [int(logits.argmax())]
        found += fed
    return found


TRUTH_NAMES = "[0-9a-f]" * 32 + ".*"
"""Names of the files in a folder of `TruthFiles`, whole or not."""


class TruthFiles:
    """A file for each question: the tokens that were forced, and full prefill's logits along them.

    A file takes 4 bytes for each forced token and each word of the vocabulary. ``discard`` and
    ``close`` delete; a process that is killed leaves its files for the next one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, question_id: str, own: Sequence[int], truth: Forced) -> None:
        """Keep what is forced along ``own``, the tokens of full prefill's answer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {"tokens": torch.tensor(own), "own": truth.own.contiguous()}
        if truth.reference is not None:
            tensors |= {
                "reference": truth.reference.contiguous(),
                "expected": torch.tensor(truth.expected),
            }
        # whole or not at all: a process that is killed here leaves no half file behind
        made = self._file(question_id).with_suffix(".tmp")
        save_file(tensors, made)
        made.replace(self._file(question_id))

    def has(self, question_id: str) -> bool:
        """Whether a question is kept."""
        return self._file(question_id).exists()

    def read(self, question_id: str) -> tuple[list[int], Forced]:
        """The tokens and the logits that were kept of a question."""
        found = load_file(self._file(question_id))
        expected = tuple(found["expected"].tolist()) if "expected" in found else ()
        truth = Forced(own=found["own"], reference=found.get("reference"), expected=expected)
        return found["tokens"].tolist(), truth

    def discard(self, question_id: str) -> None:
        """Delete what is kept of a question, if it is there."""
        self._file(question_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the folder if nothing is in it."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _file(self, question_id: str) -> Path:
        name = hashlib.sha256(question_id.encode()).hexdigest()[:32]
        return self._folder / f"{name}.safetensors"


REUSE = "reuse"
"""The method of chunk caches as they are, which other labels' figures are divided by."""

_SHARED = (*DIVERGENCES, "first_top1", "top1")


def summarise(rows: Iterable[Row]) -> list[Row]:
    """A row for each (label, kind), and for each label over all kinds, which is `ALL`.

    Figures are means over questions with 95 % bootstrap intervals, those of KL also medians. With
    `REUSE` without eviction among the labels, each figure but ``answer_llr`` also as a multiple of
    the first such label's (``kl_of_reuse``), those of KL with intervals; None where that is 0.
    ``answer_llr`` is left out unless all questions have it. All labels must have the same
    questions, in the same order.
    """
    rows = list(rows)
    base = next((r["label"] for r in rows if r["method"] == REUSE and not r["eviction"]), None)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for kind in (ALL, row["kind"]):
            groups.setdefault((kind, row["label"]), []).append(row)
    kinds = list(dict.fromkeys([ALL, *(kind for kind, _ in groups)]))
    order = sorted(groups, key=lambda name: kinds.index(name[0]))
    return [_summary(*name, groups[name], groups.get((name[0], base or ""))) for name in order]


def _summary(
    kind: str,
    label: str,
    group: Sequence[Row],
    reuse: Sequence[Row] | None,
) -> Row:
    line: dict[str, Any] = {"label": label, "kind": kind, "questions": len(group)}
    for key in ("method", "eviction", "store_bits"):
        line[key] = group[0][key]
    for name in ("tokens", "recompute_ratio"):
        line[name] = fmean(row[name] for row in group)
    for name in MEASURES:
        if name == OF_REFERENCE and any(row[name] is None for row in group):
            continue
        values = [row[name] for row in group]
        line[name] = fmean(values)
        line[f"{name}_low"], line[f"{name}_high"] = interval(values)
        if name in DIVERGENCES:
            line[f"{name}_median"] = median(values)
    for name in _SHARED if reuse else ():
        values, bases = ([row[name] for row in rows] for rows in (group, reuse or ()))
        base, ratio = fmean(bases), f"{name}_of_reuse"
        line[ratio] = line[name] / base if base else None
        if name in DIVERGENCES:
            low, high = ratio_interval(values, bases) or (None, None)
            line[f"{ratio}_low"], line[f"{ratio}_high"] = low, high
    return line


FOLDER_DOCUMENTS = 8
"""Chunks of a folder that stand in one prompt, unless it is said how many."""


class FidelityQuestions:
    """Questions of files and folders.

    Args:
        sources: ``builtin`` for those that are shipped, JSON Lines files, and folders of documents.
        part: which half of them.
        n_documents: most documents a question; None for all, and `FOLDER_DOCUMENTS` of a folder.
        chunk_size: longest chunk of a document in a folder, in tokens.

    Raises:
        InvalidOption: a source does not exist or is broken, or an option is out of range.
        UnknownOption: an unknown part.
        EmptyInput: a folder holds no document, or a file no question.
    """

    def __init__(
        self, sources: Sequence[str], part: Part, n_documents: int | None, chunk_size: int
    ) -> None:
        self._part, self._n_documents, self._chunk_size = part, n_documents, chunk_size
        folders = [source for source in sources if Path(source).is_dir()]
        files = [s for s in sources if s not in folders and s != BUILTIN]
        for file in files:
            if not Path(file).exists():
                raise InvalidOption(
                    f"unknown data {file!r}; give {BUILTIN!r}, a JSON Lines file, or a folder of "
                    f"{' and '.join(SUFFIXES)}"
                )
        given = load([str(QUESTIONS)], prompt="rag") if BUILTIN in sources else []
        given += load(files, labelled=False) if files else []
        self._given = self._chosen(given)
        self._folders = {
            Path(name).resolve().name: find_documents([Path(name)]) for name in folders
        }
        if len(self._folders) < len(folders):
            raise InvalidOption(f"two of {', '.join(folders)} have one name; rename one")
        self._of_folders: list[Question] | None = None

    def of(self, model: Model) -> list[Question]:
        """All questions. Documents of folders are cut by the tokenizer of the first ``model``.

        So every model is asked the same.
        """
        if self._of_folders is None:
            self._of_folders = [
                question
                for name, found in self._folders.items()
                for question in self._of_folder(name, found, model)
            ]
        questions = [*self._given, *self._of_folders]
        if len({question.id for question in questions}) < len(questions):
            raise InvalidOption("two questions have one id; rename one of the files and folders")
        return questions

    def _of_folder(self, name: str, found: Found, model: Model) -> list[Question]:
        read = read_chunks(found.files, model, self._chunk_size)
        for skipped in (*found.skipped, *read.skipped):
            typer.echo(visible(f"left out: {skipped.path}: {skipped.why}"), err=True)
        n_documents = FOLDER_DOCUMENTS if self._n_documents is None else self._n_documents
        texts = [chunk.text for chunk in read.chunks]
        return of_part(neighbour_questions(texts, n_documents, name), self._part)

    def _chosen(self, questions: Sequence[Question]) -> list[Question]:
        chosen = of_part(questions, self._part)
        most = self._n_documents
        return chosen if most is None else [with_fewer(q, most) for q in chosen]


_TRUTHS = "truths"
_TRUTH_FILES = f"{_TRUTHS}/{TRUTH_NAMES}"
"""The folder in that of a run where full prefill's logits wait for the floor."""


def fidelity(
    model: own.Models = None, device: args.Device = "auto", dtype: args.Dtype = "auto",
    data: own.FidelityData = None, chunk_size: args.ChunkSize = 256, part: own.Part = None,
    store_bits: own.StoreBitsList = str(DEFAULT_STORE_BITS),
    questions: own.MostQuestions = None, documents: own.MostDocuments = None,
    tokens: own.ForcedTokens = 32, past_end: own.PastEnd = False, chat: args.Chat = False,
    methods: own.AllMethods = "all", budgets: own.Budgets = "",
    recompute_ratios: own.Ratios = "", eviction: own.Evictions = "",
    floor: own.Floor = False, output: own.RunFolder = None, fresh: own.Fresh = False,
    json_file: own.JsonFile = None, plot: own.Plot = None,
) -> None:  # fmt: skip
    """How far every method's next-token distributions are from full prefill's, on real text."""
    names, half = _models(model), cast(Part, part or ("all" if data else "report"))
    again = loading.shares("--recompute-ratios", recompute_ratios)
    kept = loading.shares("--budgets", budgets)
    rules = variants.evictions_of(loading.words(eviction))
    compared = variants.combine(runs.method_names(methods), kept, again, rules)
    bits = list(dict.fromkeys(loading.counts("--store-bits", store_bits)))
    if not bits:
        raise InvalidOption(f"--store-bits {store_bits!r} names none; give 4, 8 or 16")
    if plot:
        picture.check(plot)
    for file in (json_file, plot):
        runs.require_folder(file)
    config = FidelityConfig(
        questions=(), store_bits=bits[0],
        # what is measured against is always there
        variants=variants.at_store_bits({TRUTH: Variant(method=METHODS[TRUTH]), **compared}, bits),
        tokens=tokens, past_end=past_end, chat=chat, most=questions, floor=floor,
    )  # fmt: skip
    asked = FidelityQuestions(data or [BUILTIN], half, documents, chunk_size)
    done = []
    for name in names:
        folder = output / _file_name(name) if output and len(names) > 1 else output
        load = partial(runs.loaded_model, name, device)
        opened = partial(runs.journal_of, folder, fresh=fresh, beside=_TRUTH_FILES)
        done.append(_measured(config, partial(load, dtype), load, asked.of, opened, half))
    _show(dict(zip(names, done, strict=True)), json_file, plot)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The summary of a model's run, and what it depends on."""

    rows: list[Row]
    settings: Mapping[str, Any]
    left_out: Mapping[str, int]


def _models(given: Sequence[str] | None) -> list[str]:
    names = given or [BUILTIN]
    if len(set(names)) < len(names):
        raise InvalidOption(f"--model {' --model '.join(names)}; name each model once")
    return list(names)


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model).strip("._") or "model"


def _measured(
    config: FidelityConfig,
    load: Callable[[], Model],
    load_as: Callable[[str], Model],
    asked: Callable[[Model], list[Question]],
    journal_of: Callable[[Mapping[str, Any]], Journal],
    part: Part,
) -> _Run:
    """The run of one model. load_as: loads it in a given dtype, for the floor."""
    model = load()
    config = replace(config, questions=asked(model))
    settings = {**config.settings(model), "part": part}
    with journal_of(settings) as journal:
        truths = TruthFiles(journal.folder / _TRUTHS) if config.floor else None
        result = run(config, model, journal, truths)
        dtype = other_dtype(model)
        del model
        _release()
        if truths:
            measure_floor(config, load_as(dtype), journal, truths, result)
            _release()
    rows = summarise(result.rows)
    typer.echo(
        f"{journal.folder}: {rows[0]['questions']} questions; left out: {result.too_long} too long",
        err=True,
    )
    return _Run(rows=rows, settings=settings, left_out={"too_long": result.too_long})


def _release() -> None:
    """Free what a model took before the next one is loaded: engines refer to it in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _show(done: Mapping[str, _Run], json_file: Path | None, plot: Path | None) -> None:
    named = [{"model": name, **row} for name, run in done.items() for row in run.rows]
    only = next(iter(done.values())) if len(done) == 1 else None
    rows: list[Row] = only.rows if only else list(named)
    if json_file:
        more = (
            {"hardware": only.settings["hardware"], "settings": only.settings,
             "left_out": only.left_out}
            if only else
            {"settings": {name: run.settings for name, run in done.items()},
             "left_out": {name: run.left_out for name, run in done.items()}}
        )  # fmt: skip
        name = next(iter(done)) if only else None
        runs.write(figures.to_json("benchmarks fidelity", name, rows, more), json_file)
    if plot:
        fidelity_plot.draw(named, plot, f"{', '.join(done)}: {rows[0]['questions']} questions")
    if json_file != runs.STDOUT:
        typer.echo(figures.visible(markdown.fidelity(rows)))


app = command_line(fidelity)


def main() -> None:
    """Run the benchmark as the command line says."""
    app(prog_name="python -m benchmarks fidelity")


if __name__ == "__main__":
    main()
