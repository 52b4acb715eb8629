"""Summaries of a fidelity run, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import divergence, fidelity, markdown


def row(label: str, id: str, kind: str, **measures: float) -> dict[str, Any]:
    empty = dict.fromkeys(divergence.MEASURES, 0.0)
    return {"label": label, "id": id, "kind": kind, "method": label, "eviction": None,
            "store_bits": None, "recompute_ratio": 0.0, "tokens": 4,
            **empty, **measures}  # fmt: skip


def test_summaries_by_hand() -> None:
    rows = [
        row("reuse", "a", "one", first_kl=1, top1=1.0),
        row("epic", "a", "one", first_kl=0.5, top1=0.5, answer_llr=-1),
        row("reuse", "b", "two", first_kl=3, top1=0.0),
        row("epic", "b", "two", first_kl=0.5, top1=0.25, answer_llr=2),
        row("reuse", "c", "two", first_kl=8, top1=0.5),
        row("epic", "c", "two", first_kl=5, top1=0.75, answer_llr=2),
    ]
    found = {(line["kind"], line["label"]): line for line in fidelity.summarise(rows)}
    assert list(found) == [(kind, label) for kind in ("all", "one", "two")
                           for label in ("reuse", "epic")]  # fmt: skip
    epic = found["all", "epic"]
    assert (epic["questions"], epic["first_kl"], epic["first_kl_median"]) == (3, 2, 0.5)
    assert epic["first_kl_low"] <= 2 <= epic["first_kl_high"]
    assert (epic["answer_llr"], epic["tokens"]) == (1, 4)
    assert (epic["first_kl_of_reuse"], epic["top1_of_reuse"]) == (0.5, 1)
    assert (epic["kl"], epic["kl_of_reuse"]) == (0, None)  # nothing to divide by
    assert found["two", "epic"]["first_kl_of_reuse"] == pytest.approx(2.75 / 5.5)
    low, high = (epic[f"first_kl_of_reuse_{end}"] for end in ("low", "high"))
    assert (low, high) == pytest.approx((1 / 6, 5 / 8))  # of "b" alone, of "c" alone
    assert epic["kl_of_reuse_low"] is None
    text = markdown.fidelity(list(found.values()))
    for title in ("All questions", "one", "two"):
        assert f"## {title}\n\n| label | first KL |" in text
    assert (
        "| epic | 2.0000 [0.5000, 5.0000] | 0.5000 |" in text
        and "| 0.50 [0.17, 0.62] | - |" in text
    )
    alone = fidelity.summarise([line for line in rows if line["label"] == "epic"])
    assert not [key for key in alone[0] if "of_reuse" in key]
    assert "of reuse" not in markdown.fidelity(alone)


def test_caches_in_several_bits_are_divided_by_the_first_reuse() -> None:
    rows = [
        row("reuse, 4 bits", "a", "one", kl=2) | {"method": "reuse", "store_bits": 4},
        row("reuse, 8 bits", "a", "one", kl=1) | {"method": "reuse", "store_bits": 8},
        row("reuse + snapkv", "a", "one", kl=8) | {"method": "reuse", "eviction": "snapkv"},
    ]
    found = [line for line in fidelity.summarise(rows) if line["kind"] == "all"]
    assert [line["kl_of_reuse"] for line in found] == [1, 0.5, 4]
    assert [line["store_bits"] for line in found] == [4, 8, None]
    alone = fidelity.summarise(rows[2:])
    assert "kl_of_reuse" not in alone[0]


def test_answers_that_are_not_known_leave_no_column() -> None:
    rows = [row("reuse", "a", "one", answer_llr=1), row("reuse", "b", "two")]
    rows[1]["answer_llr"] = None
    found = {line["kind"]: line for line in fidelity.summarise(rows)}
    assert "answer_llr" not in found["all"] and "answer_llr" not in found["two"]
    assert found["one"]["answer_llr"] == 1
    first, *others = markdown.fidelity(list(found.values())).split("## ")[1:]
    assert "answer LLR" not in first and "answer LLR" in others[0]


def test_several_models_have_a_column() -> None:
    line = fidelity.summarise([row("reuse", "a", "one") | {"recompute_ratio": 0.25}])
    together = [{"model": name, **line[0]} for name in ("m1", "m2")]
    text = markdown.fidelity(together)
    assert "| model | label | first KL |" in text and "| --- | --- | ---: |" in text
    assert "| m1 | reuse | " in text and "| m2 | reuse | " in text and "| 0.250 | 4.0 | 1 |" in text
    assert "model" not in markdown.fidelity(line) and "recomputed" not in markdown.fidelity(line)
