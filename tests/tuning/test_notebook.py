"""The notebook that says whether it is safe on one's model."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import executed, kept_and_executed

pytestmark = pytest.mark.slow  # a kernel that tunes for a minute
NAME = "is_it_safe"


def test_it_tunes() -> None:
    for ingested, tuned, _, written in kept_and_executed(NAME):
        assert "40 chunks in collection 'archive'" in ingested
        method = re.findall(r"recommended: --method ([\w-]+)", tuned)[0]
        assert f'method = "{method}"' in written
        mine, n, full = map(int, re.findall(r": (\d+) of (\d+), full prefill (\d+)", tuned)[0])
        assert mine >= full > n / 2


def test_it_has_its_plot() -> None:
    for notebook in executed(NAME):
        kinds = [
            kind for cell in notebook.cells if cell.cell_type == "code"
            for output in cell.outputs if "data" in output for kind in output.data
        ]  # fmt: skip
        assert kinds.count("image/png") == 1
