"""``python -m benchmarks``: its names, and the count of the wheel's code."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import __main__ as dispatch
from benchmarks.count import code_lines, count
from tests.bench.running import error_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def has_main(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return "main" in names and file.stem != "__main__"


def test_every_module_with_a_main_has_a_line() -> None:
    assert {file.stem for file in FOLDER.glob("*.py") if has_main(file)} == {*dispatch.BENCHMARKS}
    page, *_ = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)) == dispatch.BENCHMARKS


def test_a_benchmark_gets_its_options_and_an_unknown_name_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unknown shape 'huge'" in error_of("latency", "--shape", "huge")
    monkeypatch.setattr("sys.argv", ["benchmarks", "count", "errors.py"])
    dispatch.main()
    shown = capsys.readouterr().out
    assert "samkv_integrations/errors.py" in shown and "samkv_integrations/cache" in shown
    monkeypatch.setattr("sys.argv", ["benchmarks", "speed"])
    with pytest.raises(SystemExit, match="unknown benchmark 'speed'"):
        dispatch.main()
    monkeypatch.setattr("sys.argv", ["benchmarks", "ingest", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert "Usage: python -m benchmarks ingest" in capsys.readouterr().out


def test_code_is_what_is_neither_blank_nor_a_comment_nor_a_docstring(tmp_path: Path) -> None:
    source = '''"""What it is.

In lines."""

# why
LIMIT = 3
"""Of what."""


def double(  # of a number
    n: int,
) -> int:
    """Twice."""
    return 2 * n
'''
    assert code_lines(source) == 5
    (tmp_path / "samkv_integrations" / "cache").mkdir(parents=True)
    (tmp_path / "samkv_integrations" / "cache" / "a.py").write_text(source)
    (tmp_path / "samkv_integrations" / "errors.py").write_text("X = 1\n")
    found = count(tmp_path)
    assert found.lines == {"samkv_integrations/cache": 5, "samkv_integrations/(root)": 1}
    assert found.files == {"samkv_integrations/cache": 1, "samkv_integrations/(root)": 1}
