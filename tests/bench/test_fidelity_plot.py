"""The picture of fidelity runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import fidelity_plot
from benchmarks.fidelity_plot import Point
from samkv_integrations.errors import InvalidOption


def row(model: str, label: str, kl: float, share: float, kind: str = "all") -> dict[str, Any]:
    return {"model": model, "label": label, "kind": kind, "kl": kl, "kl_low": kl / 2,
            "kl_high": 2 * kl, "recompute_ratio": share}  # fmt: skip


ROWS = [
    row("one", "recompute", 0, 1), row("one", "recompute, bfloat16", 0.001, 1),
    row("one", "reuse, 4 bits", 0.2, 0), row("one", "reuse, 4 bits", 9, 0, kind="town"),
    row("two", "recompute", 0, 1), row("two", "reuse, 4 bits", 0.3, 0),
    row("two", "epic", 0.1, 0.15),
]  # fmt: skip


def test_what_is_drawn() -> None:
    assert fidelity_plot.points(ROWS) == {
        "one": [Point(label="reuse, 4 bits", share=0, kl=0.2, low=0.1, high=0.4)],
        "two": [
            Point(label="reuse, 4 bits", share=0, kl=0.3, low=0.15, high=0.6),
            Point(label="epic", share=15, kl=0.1, low=0.05, high=0.2),
        ],
    }
    assert fidelity_plot.floors(ROWS) == {"one": 0.001}


def test_a_picture_names_models_and_labels(tmp_path: Path) -> None:
    fidelity_plot.draw(ROWS, tmp_path / "a.svg", "a title")
    drawn = (tmp_path / "a.svg").read_text("utf-8")
    for text in ("one", "two", "one, floor", "reuse, 4 bits", "epic", "a title"):
        assert f"<!-- {text} -->" in drawn
    assert "two, floor" not in drawn and "<!-- recompute -->" not in drawn
    with pytest.raises(InvalidOption, match=r"must end in \.png or \.svg"):
        fidelity_plot.draw(ROWS, tmp_path / "a.pdf")
