"""The snippets of the README and the guides are run as they stand, on the built-in model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samkv_integrations.chroma.client import open_collection
from samkv_integrations.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
SNIPPETS = PYTHON.findall(README)
GUIDES = {  # and what their snippets print
    "langchain": ("Vasumex Trading", "Hadorix Press"),
    "llama-index": ("Vasumex Trading", "Hadorix Press"),
}


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


def test_the_llama_index_snippet_answers_from_caches(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = run(SNIPPETS[0], tmp_path)
    assert "Vasumex Trading" in printed
    assert "chunk_misses={}" in printed
    assert "chunk_hits=2" in printed  # LlamaIndex retrieves two nodes unless told otherwise


def test_the_langchain_snippet_answers_from_caches(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for _ in range(2):  # people run it again
        printed = run(SNIPPETS[1], tmp_path)
        assert "Vasumex Trading" in printed
        assert "chunk_misses={}" in printed
        assert "chunk_hits=4" in printed  # as many as LangChain retrieves unless told otherwise
    collection = open_collection(tmp_path / "chroma", "town", create=False)
    assert collection.count() == len([*(ROOT / "examples" / "town_records").glob("*.txt")])


def test_the_plain_snippet_answers_from_caches(tmp_path: Path) -> None:
    printed = run(SNIPPETS[2], tmp_path)
    assert "Nombury" in printed
    assert "chunk_hits=2" in printed


@pytest.mark.parametrize("name", GUIDES)
def test_the_snippets_of_a_guide_run_one_after_the_other(tmp_path: Path, name: str) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    snippets = PYTHON.findall((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    printed = run("\n".join(snippets), tmp_path)
    assert [answer for answer in GUIDES[name] if answer not in printed] == []


@pytest.mark.parametrize("name", GUIDES)
def test_links_of_a_guide_lead_somewhere(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / "docs" / path).exists(), target
        assert path or anchor in anchors, target


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["llama-index", "langchain", "plain"])
def test_snippets_are_short(snippet: str) -> None:
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_table_of_methods_is_that_of_the_command() -> None:
    """If this fails, put what ``samkv methods --markdown`` prints into the README."""
    done = CliRunner().invoke(app, ["methods", "--markdown"])
    assert done.exit_code == 0
    assert done.stdout.strip() in README
