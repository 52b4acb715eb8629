"""The table of runtimes: names without imports, and a runtime of another distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import UnknownOption
from samkv_integrations.runtimes import RUNTIMES

OF_ANOTHER = """
from samkv_integrations import Engine
from samkv_integrations.runtimes import RUNTIMES

assert list(RUNTIMES)[-1] == "table", list(RUNTIMES)
import sys
assert "torch" not in sys.modules
engine = Engine.from_pretrained("anything", runtime="table", method="reuse")
assert engine.model.name == "table"
assert engine.generate("Who?", max_new_tokens=3).report.completion_tokens == 3
assert "torch" not in sys.modules
"""


def test_an_unknown_runtime_is_told_with_those_that_are_known() -> None:
    assert list(RUNTIMES)[0] == "transformers"
    with pytest.raises(UnknownOption, match=r"transformrs.*transformers"):
        Engine.from_pretrained("builtin", runtime="transformrs")


def test_another_distribution_adds_one_by_an_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "table_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: table-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[samkv.runtimes]\ntable = tests.support.table_runtime:TABLE\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{OF_ANOTHER}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
