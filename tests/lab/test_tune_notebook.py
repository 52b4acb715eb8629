"""The notebook that says whether it is safe on one's model."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import kept_and_executed

pytestmark = pytest.mark.slow  # a kernel that tunes for a minute
NAME = "is_it_safe"


def test_it_tunes() -> None:
    for ingested, tuned, _, written in kept_and_executed(NAME):
        assert "40 chunks in collection 'archive'" in ingested
        method = re.findall(r"recommended: --method ([\w-]+)", tuned)[0]
        assert f"method={method!r}" in written
        mine, n, full = map(int, re.findall(r": (\d+) of (\d+), full prefill (\d+)", tuned)[0])
        assert mine >= full > n / 2
