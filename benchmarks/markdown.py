"""Tables of runs over questions, ready for docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.divergence import OF_REFERENCE
from benchmarks.variants import ALL, Table4Row
from samkv_integrations.cli.tables import markdown_table
from samkv_integrations.figures import Row, size

MOST_NUMBERS = 6
"""Different numbers of documents that get a table each; data with more of them have no groups."""

_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "label": lambda row: str(row["label"]),
    "f1": lambda row: f"{row['f1']:.3f}",
    "95 %": lambda row: f"{row['f1_low']:.3f} to {row['f1_high']:.3f}",
    "rouge l": lambda row: f"{row['rouge_l']:.3f}",
    "exact match": lambda row: f"{row['exact_match']:.3f}",
    "same as recompute": lambda row: f"{row['same_as_recompute']:.3f}",
    "kept ratio": lambda row: f"{row['kept_ratio']:.3f}",
    "recompute ratio": lambda row: f"{row['recompute_ratio']:.3f}",
    "bytes read": lambda row: size(row["bytes_read"]),
    "kv bytes": lambda row: size(row["kv_bytes"]),
    "ttft ratio": lambda row: f"{row['ttft_ratio']:.3f}",
    "questions": lambda row: str(row["questions"]),
}
_NEEDS = {
    "rouge l": "rouge_l",
    "same as recompute": "same_as_recompute",
    "ttft ratio": "ttft_ratio",
}

_FIDELITY: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]),
    "label": lambda row: str(row["label"]),
    "first KL": lambda row: _within(row, "first_kl"),
    "median": lambda row: f"{row['first_kl_median']:.4f}",
    "first top-1": lambda row: _within(row, "first_top1"),
    "KL": lambda row: _within(row, "kl"),
    "median KL": lambda row: f"{row['kl_median']:.4f}",
    "top-1": lambda row: _within(row, "top1"),
    "answer LLR": lambda row: _within(row, "answer_llr"),
    "first KL, of reuse": lambda row: _of_reuse(row, "first_kl"),
    "KL, of reuse": lambda row: _of_reuse(row, "kl"),
    "first top-1, of reuse": lambda row: _of_reuse(row, "first_top1"),
    "top-1, of reuse": lambda row: _of_reuse(row, "top1"),
    "recomputed": lambda row: f"{row['recompute_ratio']:.3f}",
    "tokens": lambda row: f"{row['tokens']:.1f}",
    "questions": lambda row: str(row["questions"]),
}
_FIDELITY_NEEDS = {"model": "model", "recomputed": "model", "answer LLR": OF_REFERENCE}
"""Column -> what all rows must have; ``model`` is in tables of several models."""
_OF_REUSE = ", of reuse"


def quality(rows: Sequence[Row]) -> str:
    """Tables of summary rows: all questions, each kind, each number of documents."""
    kinds = [k for k in dict.fromkeys(row["kind"] for row in rows) if k != ALL]
    numbers = sorted({row["documents"] for row in rows if row["documents"] is not None})
    wanted: list[tuple[str, str, int | None]] = [("All questions", ALL, None)]
    if len(kinds) > 1:
        wanted += [(kind, kind, None) for kind in kinds]
    if 1 < len(numbers) <= MOST_NUMBERS:
        wanted += [(f"{n} documents", ALL, n) for n in numbers]
    parts = []
    for title, kind, n in wanted:
        chosen = [row for row in rows if (row["kind"], row["documents"]) == (kind, n)]
        if chosen:
            parts.append(f"## {title}\n\n{_one(chosen)}")
    if len(numbers) > MOST_NUMBERS:
        parts.append(f"Numbers of documents: {numbers[0]} to {numbers[-1]}; rows are in the JSON.")
    return "\n\n".join(parts)


def _one(rows: Sequence[Row]) -> str:
    columns = [c for c in _COLUMNS if c not in _NEEDS or all(_NEEDS[c] in row for row in rows)]
    return markdown_table(columns, [[_COLUMNS[c](row) for c in columns] for row in rows])


def fidelity(rows: Sequence[Row]) -> str:
    """Tables of the summary rows of `fidelity_summary.summarise`: all questions, each data set.

    Rows with ``model`` are of several models, in a column more.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    parts = []
    for kind in kinds if len(kinds) > 2 else [ALL]:
        chosen = [row for row in rows if row["kind"] == kind]
        has_reuse = all("kl_of_reuse" in row for row in chosen)
        columns = [
            c for c in _FIDELITY
            if (has_reuse or not c.endswith(_OF_REUSE))
            and (c not in _FIDELITY_NEEDS or all(_FIDELITY_NEEDS[c] in row for row in chosen))
        ]  # fmt: skip
        cells = [[_FIDELITY[c](row) for c in columns] for row in chosen]
        title = "All questions" if kind == ALL else kind
        parts.append(
            f"## {title}\n\n{markdown_table(columns, cells, left=1 + ('model' in columns))}"
        )
    return "\n\n".join(parts)


def _within(row: Row, name: str) -> str:
    """A mean and its interval."""
    digits = 4 if name.endswith("kl") else 3
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _of_reuse(row: Row, name: str) -> str:
    """A multiple of what reuse has, and its interval where there is one."""
    ratio = f"{name}_of_reuse"
    if row[ratio] is None:
        return "-"
    low, high = (row.get(f"{ratio}_{end}") for end in ("low", "high"))
    return f"{row[ratio]:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def table1(rows: Sequence[Row]) -> str:
    """The paper's Table 1, of summary rows: share of the context held, and computed again."""
    totals = [row for row in rows if row["kind"] == ALL and row["documents"] is None]
    columns = ("method", "sequence ratio", "recomputation ratio")
    return markdown_table(
        columns,
        [
            [
                row["label"],
                f"{100 * row['kept_ratio']:.1f} %",
                f"{100 * row['recompute_ratio']:.1f} %",
            ]
            for row in totals
        ],
    )


def table3(answers: Sequence[Row]) -> str:
    """The paper's Table 3, of single answers: 100 times F1 by data set."""
    datasets, scores = _by_dataset(answers)
    rows = [[label, *_cells(scores[label], datasets)] for label in scores]
    return markdown_table(["method", *datasets, "avg."], rows)


def table4(answers: Sequence[Row], table4_rows: Mapping[str, Table4Row]) -> str:
    """The paper's Table 4, of single answers: 100 times F1 by data set."""
    datasets, scores = _by_dataset(answers)
    columns = ["label", "method", "selection", "bias", "recompute", *datasets, "avg."]
    rows = []
    for label, row in table4_rows.items():
        marks = ["-" if on is None else "yes" if on else "no"
                 for on in (row.selection, row.bias, row.recompute)]  # fmt: skip
        rows.append([label, row.method, *marks, *_cells(scores[label], datasets)])
    return markdown_table(columns, rows, left=5)


def _by_dataset(answers: Sequence[Row]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Data sets, and label -> data set -> mean F1."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in answers:
        found.setdefault(row["label"], {}).setdefault(row["dataset"], []).append(row["f1"])
    datasets = list(dict.fromkeys(row["dataset"] for row in answers))
    return datasets, {
        label: {name: fmean(values) for name, values in by_name.items()}
        for label, by_name in found.items()
    }


def _cells(scores: Mapping[str, float], datasets: Sequence[str]) -> Iterator[str]:
    """A score a data set, and their mean, as the paper has it."""
    values = [100 * scores[name] for name in datasets]
    yield from (f"{value:.2f}" for value in [*values, fmean(values)])
