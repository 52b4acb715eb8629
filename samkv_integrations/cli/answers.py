"""Answers as rows: reports, right answers, and summaries by method."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from samkv_integrations.engine.report import Report
from samkv_integrations.evaluation.judge import is_right
from samkv_integrations.evaluation.measures import exact_match, f1_score
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.formatting import Row


def answer_row(question: Question, text: str, sources: Sequence[str], report: Report) -> Row:
    """The row of one answer: texts, whether it is right if gold answers are known, and the report.

    sources: documents of its chunks, nearest first. ``answer_s`` of the row: seconds from the call
    to the last token.
    """
    answer = text.strip()
    row: dict[str, Any] = {
        "question": question.question,
        "answer": answer,
        "sources": list(sources),
    }
    if question.answers:
        row["expected"] = list(question.answers)
        row["right"] = is_right(answer, question.answers)
        row["exact_match"] = exact_match(answer, question.answers)
        row["f1"] = f1_score(answer, question.answers)
    steps = report.completion_tokens - 1
    after = steps / report.decode_tokens_per_s if report.decode_tokens_per_s else 0.0
    return row | report.to_dict() | {"answer_s": report.ttft_s + after}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of one question, with ratios to the times of `recompute` if it is among them."""
    truth = next((row for row in rows if row["method"] == "recompute"), None)
    if truth is None:
        return list(rows)
    return [
        {
            **row,
            "ttft_ratio": row["ttft_s"] / truth["ttft_s"],
            "answer_ratio": row["answer_s"] / truth["answer_s"],
        }
        for row in rows
    ]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """A row of each method in ``rows`` over all its questions, in order of appearance.

    n_right: right answers to the n_known questions whose answer is known. same_share: share of
    the questions with the same answer as `recompute`. bytes_read: mean over questions; bytes_share:
    its share of what `reuse` reads. ttft_s: median; ttft_ratio: median of the ratios to `recompute`
    at each question. None where `recompute` or `reuse` did not run. kept_ratio, recompute_ratio:
    means.

    rows: question, answer, expected and right if known, and the fields of a report. All
    methods must have answered the same questions, in the same order.
    """
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    truth, reused = by_method.get("recompute"), by_method.get("reuse")
    all_bytes = mean(row["bytes_read"] for row in reused) if reused else 0
    summaries = list[Row]()
    for name, mine in by_method.items():
        pairs = list(zip(mine, truth, strict=True)) if truth else []
        same = [one["answer"] == full["answer"] for one, full in pairs]
        known = [row for row in mine if row.get("expected")]
        found: dict[str, Any] = {
            "method": name,
            "same_share": mean(same) if same else None,
            "n_known": len(known),
            "n_right": sum(row["right"] for row in known),
        }
        for key in ("kept_ratio", "recompute_ratio", "bytes_read"):
            found[key] = mean(row[key] for row in mine)
        found["bytes_share"] = found["bytes_read"] / all_bytes if all_bytes else None
        found["ttft_s"] = median(row["ttft_s"] for row in mine)
        found["ttft_ratio"] = None
        if pairs:
            found["ttft_ratio"] = median(one["ttft_s"] / full["ttft_s"] for one, full in pairs)
        summaries.append(found)
    return summaries
