"""Lines of code and files of the wheel, by package. Blank lines, comments, docstrings do not count.

python -m benchmarks count [FILTER]

FILTER: also a line for each file whose path contains it.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOTS = ("samkv_integrations", "connectors")
"""Folders of the wheels."""

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines of ``source`` with code on them."""
    texts: set[int] = set()  # lines of docstrings, and of strings that explain a constant
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


@dataclass(kw_only=True)
class Counts:
    """lines, files: package -> number. of_files: path -> lines."""

    lines: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    of_files: dict[str, int] = field(default_factory=dict)


def count(root: Path, folders: Sequence[str] = ROOTS) -> Counts:
    """The code of ``folders`` in ``root``, by the first folder in each."""
    found = Counts()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            package = f"{parts[0]}/{parts[1] if len(parts) > 2 else '(root)'}"
            n_lines = code_lines(path.read_text(encoding="utf-8"))
            found.lines[package] += n_lines
            found.files[package] += 1
            found.of_files[path.relative_to(root).as_posix()] = n_lines
    return found


def main() -> None:
    """Write the table to standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks count", description=__doc__)
    parser.add_argument("filter", nargs="?", metavar="FILTER")
    wanted = parser.parse_args().filter
    found = count(Path(__file__).parents[1])
    rows = [(n, path) for path, n in found.of_files.items() if wanted and wanted in path]
    sys.stdout.writelines(f"{n:6} {path}\n" for n, path in rows)
    for package in sorted(found.lines):
        sys.stdout.write(f"{package:45} {found.lines[package]:6} {found.files[package]:4}\n")
    sys.stdout.write(f"{'all':45} {found.lines.total():6} {found.files.total():4}\n")


if __name__ == "__main__":
    main()
