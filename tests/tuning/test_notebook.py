"""The notebook that says whether it is safe on one's model."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import executed, kept_and_executed

pytestmark = pytest.mark.slow  # a kernel that tunes for a minute, and loads the model three times
NAME = "is_it_safe"


def test_it_tunes_and_measures() -> None:
    for ingested, tuned, _, written, measured, _ in kept_and_executed(NAME):
        assert "40 chunks in collection 'archive'" in ingested
        method = re.findall(r"recommended: --method ([\w-]+)", tuned)[0]
        assert "reached: True" in tuned and f'method = "{method}"' in written
        kl = {
            label.strip(): float(value)
            for label, value in re.findall(r"^(.{20}) KL ([\d.]+)", measured, re.MULTILINE)
        }
        assert [*kl] == ["recompute, bfloat16", "reuse", "epic", "samkv-guided"]
        floor = kl.pop("recompute, bfloat16")
        assert 0 < 20 * floor < min(kl.values())
        assert kl["samkv-guided"] < kl["reuse"]


def test_it_has_its_plots() -> None:
    for notebook in executed(NAME):
        kinds = [
            kind for cell in notebook.cells if cell.cell_type == "code"
            for output in cell.outputs if "data" in output for kind in output.data
        ]  # fmt: skip
        assert kinds.count("image/png") == 2
