"""Draws a run of `benchmarks.default_choice`: distance from full prefill over first-token time.

python -m benchmarks.choice_plot papers.json docs/pictures/real-model.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median

import matplotlib as mpl
from matplotlib.figure import Figure

BASE = "reuse, after BOS"


def main() -> None:
    """One point for each candidate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice_plot")
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "samkv"  # the same bytes from the same rows
    rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    by_label: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    base = fmean(row["kl"] for row in by_label[BASE])
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    curve = []
    for label, mine in by_label.items():
        x = median(row["first_token"] for row in mine)
        y = fmean(row["kl"] for row in mine) / base
        is_first = label.startswith("first ") or label == "epic"
        if is_first:
            curve.append((x, y))
        colour = "C3" if label == "samkv-guided" else "C0" if is_first else "0.4"
        axes.plot(x, y, "o", color=colour)
        axes.annotate(label, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.plot(*zip(*sorted(curve), strict=True), color="C0", linewidth=1, alpha=0.5)
    axes.set_yscale("log")
    axes.set_xlabel("first token, of full prefill's")
    axes.set_ylabel("KL along the answer, of reuse's after BOS")
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
