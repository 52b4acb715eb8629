"""Tests reach for nothing private of ours: read from their own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "examples/reference_model/tests")
PACKAGES = ("samkv_integrations", "connectors", "benchmarks")

OF_THE_FRAMEWORKS = {"_client", "_get_ls_params", "_identifying_params"}
"""Private names of Chroma and LangChain that classes of ours share or override: a test of what the
framework reads has to read it as the framework does."""

REACHES = {
    # a formula held against another way to write it, and codes that no model here would give
    ("tests/engine/test_doctor.py", "_kl"),
    ("tests/engine/test_doctor.py", "_range"),
}
"""Where a test reaches for something private of ours, and why nothing else would do."""

Functions = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, ast.Module]:
    """Path -> syntax tree of every Python file among the tests."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    assert len(files) > 50
    return {str(file.relative_to(ROOT)): parsed(file) for file in files}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def name_of(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names() -> frozenset[str]:
    """Private attributes, methods, functions and constants that the packages define."""
    names: set[str] = set()
    for folder in PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(parsed(file)):
                if isinstance(node, (*Functions.__args__, ast.ClassDef)):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.attr)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return frozenset(filter(is_private, names))


NAMING = ("setattr", "delattr", "getattr", "patch", "object")


def reached_for(tree: ast.Module) -> Iterator[str]:
    """Private names of ours that are read, imported or replaced from outside."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node) in NAMING:
            # an object and a name, or the path of both
            names = [
                str(given.value).split(".")[-1]
                for given in node.args[:2]
                if isinstance(given, ast.Constant)
            ]
        yield from (name for name in names if is_private(name) and name in private_names())


def test_private_names_of_ours_are_left_alone() -> None:
    reached = {
        f"{path}: {name}"
        for path, tree in sources().items()
        for name in reached_for(tree)
        if name not in OF_THE_FRAMEWORKS
    }
    assert reached - {f"{path}: {name}" for path, name in REACHES} == set()
