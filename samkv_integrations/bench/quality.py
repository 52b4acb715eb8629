"""How well a method answers: questions with their documents, every method over the same ones."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from samkv_integrations.chunk import normalise
from samkv_integrations.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra
from samkv_integrations.methods import METHODS, Method, get_method
from samkv_integrations.methods.guided import GuidedRecompute, GuidedSelect
from samkv_integrations.methods.parts import Fusion, RecomputeNone, Select, overwrite
from samkv_integrations.methods.samkv import SamkvSelect
from samkv_integrations.prompt import rag_prompt

_ARTICLES = {"a", "an", "the"}
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with the documents that are given to the model."""

    id: str
    dataset: str
    kind: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def load_questions(path: Path, kinds: Sequence[str] = ()) -> list[Question]:
    """Questions of a JSON Lines file (id, question, answers, contexts of title and text).

    kinds: keep only these values of the field ``set`` or ``kind``; empty for all. A document's text
    is its title in square brackets, a line break, and its text.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            names = {record.get("set", ""), record.get("kind", "")}
            if kinds and not names & set(kinds):
                continue
            questions.append(
                Question(
                    id=record["id"],
                    dataset=record.get("dataset", path.stem),
                    kind=record.get("set") or record.get("kind", ""),
                    question=record["question"],
                    answers=tuple(record["answers"]),
                    documents=tuple(
                        normalise(f"[{c['title']}]\n{c['text']}") for c in record["contexts"]
                    ),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path}, line {number}: {error!r}; each line must be a JSON object with id, "
                "question, answers and contexts"
            ) from error
    if not questions:
        raise EmptyInput(f"no question in {path} (kinds: {', '.join(kinds) or 'all'})")
    return questions


def f1_words(text: str) -> list[str]:
    """Words as LongBench's qa_f1_score compares them: lower case, no punctuation, no articles."""
    return [w for w in text.lower().translate(_DROP_PUNCTUATION).split() if w not in _ARTICLES]


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer equals one of the expected ones, compared as `f1_words`."""
    return float(any(f1_words(answer) == f1_words(e) for e in expected))


def f1_score(answer: str, expected: Sequence[str]) -> float:
    """LongBench's qa_f1_score, the best over the expected answers, 0 to 1."""

    def against(reference: str) -> float:
        mine, theirs = f1_words(answer), f1_words(reference)
        common = sum((Counter(mine) & Counter(theirs)).values())
        return 2 * common / (len(mine) + len(theirs)) if common else 0.0

    return max(map(against, expected))


def without(method: Method) -> Method:
    """``method`` with nothing recomputed."""
    return replace(method, recompute=RecomputeNone(), update=overwrite)


def ablation(budget: float) -> dict[str, Method]:
    """From the paper's row to the default, one knob after the other, at one kept ratio.

    Each label names what changed against the row before it; the last rows change one knob of the
    default.
    """
    paper, ours = METHODS["samkv-fusion"], METHODS["samkv-guided"]
    fusion = replace(paper, select=SamkvSelect(max_kept_ratio=budget))
    scored = GuidedSelect(
        max_kept_ratio=budget, window=None, probe="probe", probe_over="anchors",
        always="anchors", score="summaries", after=0, bias=True, rotated=False,
    )  # fmt: skip
    chain: dict[str, Select] = {"budget filled per head, no share P": scored}
    chain["no personalised bias"] = scored = replace(scored, bias=False)
    chain["the last token asks"] = scored = replace(scored, window=1)
    chain["keys in 2 bits, best token"] = scored = replace(scored, score="keys")
    chain["anchors compete"] = scored = replace(scored, always="none")
    chain["chosen layer by layer"] = scored = replace(scored, probe="layerwise", probe_over="none")
    chain["4 tokens after a hit"] = scored = replace(scored, after=4)
    chain["scores at true positions (samkv-guided)"] = scored = replace(scored, rotated=True)
    variations: dict[str, Select] = {
        "guided, last 4 tokens ask": replace(scored, window=4),
        "guided, initial blocks always": replace(scored, always="initial"),
        "guided, personalised bias": replace(scored, bias=True),
        "guided, probe over anchors": replace(scored, probe="probe", probe_over="anchors"),
        "guided, probe, one choice for all layers": replace(
            scored, probe="probe", probe_over="anchors", shared=True
        ),
    }
    guided = replace(ours, select=scored)
    recompute = GuidedRecompute(ratio=0.1)
    return {
        "samkv-fusion": fusion,
        "samkv-overwrite": replace(fusion, update=overwrite),
        "nothing recomputed": without(fusion),
        **{label: replace(ours, select=select) for label, select in chain.items()},
        **{label: replace(ours, select=select) for label, select in variations.items()},
        "guided, 10 % recomputed, overwrite": replace(guided, recompute=recompute),
        "guided, 10 % recomputed, fusion": replace(guided, recompute=recompute, update=Fusion()),
    }


def at_budgets(names: Sequence[str], budgets: Sequence[float]) -> dict[str, Method]:
    """The named methods; those that select, once for every kept ratio in ``budgets``."""
    methods: dict[str, Method] = {}
    for name in names:
        method = get_method(name)
        if not hasattr(method.select, "max_kept_ratio") or not budgets:
            methods[name] = method
            continue
        for budget in budgets:
            select: Any = method.select
            methods[f"{name} @ {budget:g}"] = replace(
                method, select=replace(select, max_kept_ratio=budget)
            )
    return methods


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean (2,000 resamples, fixed seed)."""
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingExtra.of("scipy", "bench") from error
    if len(set(values)) < 2:  # nothing to resample
        return values[0], values[0]
    found = bootstrap(
        (values,), fmean, n_resamples=2_000, vectorized=False, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a label: means over questions and medians of times.

    With ``recompute`` among them, also the share of questions whose answer is the same as its.
    """
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    full = {row["id"]: row for row in by_label.get("recompute", [])}
    summary = []
    for label, group in by_label.items():
        line: dict[str, Any] = {"label": label, "questions": len(group)}
        for name in ("exact_match", "f1", "kept_ratio", "recompute_ratio", "bytes_read"):
            line[name] = fmean(row[name] for row in group)
        line["exact_match_low"], line["exact_match_high"] = interval(
            [row["exact_match"] for row in group]
        )
        line["ttft_s"] = median(row["ttft_s"] for row in group)
        line["chunk_misses"] = sum(sum(row["chunk_misses"].values()) for row in group)
        if full:
            line["same_as_recompute"] = fmean(
                row["answer"] == full[row["id"]]["answer"] for row in group
            )
            line["ttft_ratio"] = median(row["ttft_s"] / full[row["id"]]["ttft_s"] for row in group)
        summary.append(line)
    return summary


def answerable(
    engine: Engine, questions: Iterable[Question], *, chat: bool = False
) -> Iterator[Question]:
    """The questions that full prefill answers exactly right."""
    for question in questions:
        for row in run(engine, [question], {"recompute": METHODS["recompute"]}, chat=chat):
            if row["exact_match"]:
                yield question


def run(
    engine: Engine,
    questions: Sequence[Question],
    methods: Mapping[str, Method],
    *,
    chat: bool = False,
    max_new_tokens: int = 16,
) -> Iterator[dict[str, Any]]:
    """A row for each question and method, as they finish; chunks are cached before they are timed.

    methods: label -> method; the label is the row's ``label``.
    """
    for question in questions:
        engine.cache_chunks(question.documents)
        prompt = rag_prompt(question.question, question.documents, chat=chat)
        for label, method in methods.items():
            answer = engine.generate(
                prompt, question.documents, method=method, max_new_tokens=max_new_tokens
            )
            text = answer.text.strip()
            yield {
                "label": label,
                "id": question.id,
                "dataset": question.dataset,
                "kind": question.kind,
                "question": question.question,
                "answer": text,
                "expected": list(question.answers),
                "exact_match": exact_match(text, question.answers),
                "f1": f1_score(text, question.answers),
                **answer.report.to_dict(),
            }
