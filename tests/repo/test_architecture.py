"""Who may import whom, and what importing may not do.

The imports are read from the source, so that one inside a function counts like any other.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "samkv_integrations"
DISTRIBUTIONS = (ROOT / "connectors" / "langchain", ROOT / "connectors" / "llama-index")

FLOORS = (
    {"errors", "release", "report"},
    {"option"},
    {"store"},
    {"prompt"},
    {"methods"},
    {"options"},
    {"runtimes"},
    {"runtimes.llama_cpp", "runtimes.transformers", "chunks"},
    {"plan"},
    {"serving"},
    {"engine"},
    {""},
    {"chroma", "frameworks"},
    {"connectors", "ingest", "server"},
    {"lab"},
    {"cli"},
)
"""Rooms from the bottom up: one imports from lower floors, and from within itself, only.

A room is a package of the core, a runtime, or one of the few files beside the packages; "" is the
core's ``__init__``, "connectors" all of those, and ``__main__`` is of the command line."""

CONNECTORS = (
    "langchain_samkv",
    "llama_index.llms.samkv",
    "llama_index.postprocessor.samkv",
    "llama_index.vector_stores.samkv",
)

OWNERS = {
    **dict.fromkeys(
        ("huggingface_hub", "safetensors", "torch", "transformers"),
        {"runtimes.transformers", "lab"},
    ),
    **dict.fromkeys(("llama_cpp", "xllamacpp"), {"runtimes.llama_cpp"}),
    "chromadb": {"chroma", "connectors"},
    "sentence_transformers": {"chroma"},
    **dict.fromkeys(("fastapi", "prometheus_client", "starlette", "uvicorn"), {"server"}),
    "llama_index": {"connectors"},
    "opentelemetry": {"serving"},
    "ray": {"cli", "ingest"},
    **dict.fromkeys(("langchain", "langchain_chroma", "langchain_core"), {"connectors"}),
}
"""Top-level package -> what alone may import it."""

MOST_FILES = 14
"""Files of a folder, without those of its folders."""


def sources() -> dict[str, Path]:
    """Dotted name of every module of the wheels, as it is imported -> its file."""
    found = {}
    for folder, base in ((ROOT / PACKAGE, ROOT), *((each, each) for each in DISTRIBUTIONS)):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


SOURCES = sources()


def room(module: str) -> str:
    """What `FLOORS` calls the package, or the file, that a module of ours belongs to."""
    head, _, rest = module.partition(".")
    if head != PACKAGE:
        return "connectors"
    for runtime in ("runtimes.llama_cpp", "runtimes.transformers"):
        if rest.startswith(runtime):
            return runtime
    room = rest.split(".")[0]
    return "cli" if room == "__main__" else room


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[str]:
    """Full dotted names that ``module`` imports, ``import_module("...")`` included."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{module}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else node.module
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            name = node.args[0]
            if ast.unparse(name).startswith("f'{__name__}."):
                continue  # of a table of public names, which are imported for type checkers
            assert isinstance(name, ast.Constant), f"{module}: imports a name that it computes"
            yield str(name.value)


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def ours(module: str) -> set[str]:
    """Modules of the wheels that ``module`` imports."""
    return {name for name in imports(module) if name in SOURCES}


def test_every_room_has_a_floor() -> None:
    placed = [name for floor in FLOORS for name in floor]
    assert len(placed) == len(set(placed))
    assert {room(module) for module in SOURCES} == set(placed)


def test_the_page_has_the_floors() -> None:
    """If this fails, put the floors into the table of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown: dict[int, set[str]] = {}
    for number, cell in re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE):
        names = {name.replace("/", ".") for name in re.findall(r"`([^`]+)`", cell)}
        names = {"" if name == PACKAGE else name for name in names}
        shown.setdefault(int(number), set()).update(names)
    assert shown == dict(enumerate(FLOORS, 1))


def test_no_folder_is_too_full() -> None:
    for folder in {file.parent for file in SOURCES.values()}:
        names = {file.stem for file in folder.glob("*.py")} - {"__init__", "__main__"}
        assert len(names) <= MOST_FILES, folder


def test_imports_point_down() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for module, imported in [(each, other) for each in SOURCES for other in ours(each)]:
        here, there = room(module), room(imported)
        is_within = here == there and "." in imported.removeprefix(PACKAGE).removeprefix(".")
        assert is_within or floor_of[there] < floor_of[here], f"{module} imports {imported}"


def test_no_module_imports_itself_on_a_detour() -> None:
    order = TopologicalSorter({module: ours(module) for module in SOURCES})
    assert set(order.static_order()) >= set(SOURCES)  # raises CycleError, which names the modules


def test_the_imports_are_seen() -> None:
    """Guards the tests around it: an import that is not seen breaks no rule."""
    seen = ours(f"{PACKAGE}.cli.loading") | ours(f"{PACKAGE}.cli.quickstart")
    assert f"{PACKAGE}.engine" in seen  # from a.b import c, c is no module
    assert f"{PACKAGE}.cli.tables" in seen  # from a import b, b is a module
    assert "chromadb" in imports(f"{PACKAGE}.chroma.client")  # inside a function


def test_frameworks_stay_in_their_module() -> None:
    for module, imported in [(each, other) for each in SOURCES for other in imports(each)]:
        owners = OWNERS.get(imported.split(".")[0])
        if owners is not None and imported not in SOURCES:
            assert room(module) in owners, f"{module} may not import {imported}"


_TRANSFORMERS = f"{PACKAGE}.runtimes.transformers"
SHARED = {f"{_TRANSFORMERS}.papers.base", f"{_TRANSFORMERS}.eviction.base"}
ROOMS = (f"{_TRANSFORMERS}.papers.", f"{_TRANSFORMERS}.eviction.")
PAPERS = {m for m in SOURCES if m.startswith(ROOMS)} - SHARED


def test_papers_share_parts_only() -> None:
    for paper in PAPERS:
        assert {m for m in ours(paper) if m.startswith(ROOMS)} <= SHARED, paper


def test_nothing_stands_above_the_connectors() -> None:
    """``llama_index`` belongs to nobody: one ``__init__.py`` there hides everyone else's part."""
    outside = [m for m in SOURCES if room(m) == "connectors" and not m.startswith(CONNECTORS)]
    assert not outside
    assert not [each for each in DISTRIBUTIONS if (each / "__init__.py").exists()]


IMPORT_ALL = """
import importlib, logging, sys

for extra in {extras}:
    sys.modules[extra] = None  # importing it fails, as if it were not installed

import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    return {{
        "attention functions": sorted(ALL_ATTENTION_FUNCTIONS),
        "mask functions": sorted(ALL_MASK_ATTENTION_FUNCTIONS),
        "verbosity of transformers": transformers.utils.logging.get_verbosity(),
        "log handlers": list(logging.getLogger().handlers),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "seed": torch.random.initial_seed(),
        "gradients": torch.is_grad_enabled(),
    }}

before = state()
for module in {modules}:
    importlib.import_module(module)
changed = [name for name, value in state().items() if value != before[name]]
assert not changed, changed
assert "samkv" not in ALL_ATTENTION_FUNCTIONS
"""


IMPORT_WITHOUT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith({frameworks}):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
for framework in {frameworks}:  # the block holds
    try:
        importlib.import_module(framework)
    except ImportError as error:
        assert "is blocked" in str(error)
    else:
        raise AssertionError(framework)
for module in {modules}:
    importlib.import_module(module)
"""


@pytest.mark.slow  # processes that import every framework
@pytest.mark.parametrize(
    ("frameworks", "modules"),
    [
        (("langchain",), [m for m in SOURCES if m.startswith("llama_index.")]),
        (("llama_index",), [m for m in SOURCES if m.startswith("langchain_samkv")]),
        (("langchain", "llama_index"), [PACKAGE]),
    ],
    ids=["llama-index-alone", "langchain-alone", "none"],
)
def test_a_framework_needs_no_other(frameworks: tuple[str, ...], modules: list[str]) -> None:
    """``langchain`` stands for every package whose name begins so."""
    assert modules
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT.format(frameworks=frameworks, modules=modules)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.slow  # a process that imports every module, which continuous integration begins too
def test_importing_needs_no_extra_and_changes_nothing() -> None:
    """In a process of its own: here other tests have made engines, which do register."""
    extras = ("llama_index", "langchain_core", "chromadb", "sklearn", "scipy",
              "semantic_text_splitter", "matplotlib", "ray")  # fmt: skip
    modules = [m for m in SOURCES if room(m) != "connectors" and m not in APART]
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(extras=extras, modules=modules)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert not found.stdout


APART = {f"{PACKAGE}.runtimes.transformers.entries.triton_kernels", f"{PACKAGE}.cli.ray"}
"""What these need is there when they are imported: Triton, which comes with torch's CUDA builds,
where there is such a device; and Ray, which imports the other one itself."""

IMPORTED_BY = """
import importlib, sys

import transformers.modeling_utils  # itself imports accelerate where that is, and that boto3

theirs = set(sys.modules)
for module in {modules}:
    importlib.import_module(module)
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - theirs}}))
"""


@pytest.mark.slow  # a process that imports every module, which continuous integration begins too
def test_the_core_imports_no_cluster_and_no_remote_file_system() -> None:
    """Not even where they are installed: they take seconds, and are of those who ask for them."""
    modules = [m for m in SOURCES if room(m) not in ("connectors", "server")]
    modules = [m for m in modules if m not in APART]
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY.format(modules=modules)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    imported = set(found.stdout.split())
    assert PACKAGE in imported
    remote = {"fsspec", "s3fs", "boto3", "botocore", "aiobotocore"}
    assert not imported & {"ray", "opentelemetry", *remote}


def test_all_is_logged_under_one_logger() -> None:
    for module, file in SOURCES.items():
        source = file.read_text(encoding="utf-8")
        assert "warnings.warn" not in source and "logging.warning(" not in source, module
        if not module.startswith(PACKAGE):
            own = source.count(f'getLogger("{PACKAGE}.')
            assert source.count("getLogger(") == own, module
