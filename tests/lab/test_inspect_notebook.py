"""The notebook that looks into answers."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import kept_and_executed

pytestmark = pytest.mark.slow  # a kernel, and fifteen answers that are watched
NAME = "what_did_it_read"


def test_it_shows_what_it_says() -> None:
    _, (asked, answered, _, compared, _, wrong) = kept_and_executed(NAME)
    assert [line.split(":")[0] for line in asked.splitlines()] == [
        "reference", "single-hop", "two-hop",
    ]  # fmt: skip
    ours, full = re.findall(r"prefill: (\w+), expected: (\w+)", answered)[0]
    assert ours == full and answered.startswith(f"epic: {ours}, ")
    lost = {tuple(line.split()[:2]): float(line.split()[-3]) for line in compared.splitlines()}
    assert len(lost) == 12
    for kind in ("reference", "single-hop", "two-hop"):
        assert lost[kind, "epic"] < lost[kind, "reuse"]
    reused, truth = re.findall(r"reuse: (\w+), full prefill: (\w+)", wrong)[0]
    assert reused != truth == full
    assert truth.startswith(re.findall(r">> ' (\d+)'", wrong)[0])  # the number, above all


def test_it_holds_what_it_prints() -> None:
    """If this fails, execute the notebook again and keep its outputs, without standard error's."""
    kept, again = kept_and_executed(NAME)
    assert [re.sub(r"\d\.\d+ ", "", text) for text in kept] == [
        re.sub(r"\d\.\d+ ", "", text) for text in again
    ]
