"""``python -m benchmarks``: its names, and the count of the wheel's code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks import __main__ as dispatch

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
