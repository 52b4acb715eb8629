"""The LlamaIndex script and notebook of the examples, run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "llama_index.ipynb"


def printed(notebook: Any) -> list[str]:
    """What each cell of code wrote to standard output."""
    return [
        "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture(scope="module")
def executed() -> Any:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        NotebookClient(
            notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}
        ).execute()
    return notebook


def test_script() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "llama_index_quickstart.py"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    out = " ".join(done.stdout.split())  # an answer begins with a space of its own
    assert out.count("Where was Ingrid Delumb born? Trulhaven") == 3  # asked, streamed, in a chat
    assert "Where was Ingrid Delumb born? Borminster" in out  # after the document changed
    assert "Who does Thea Nilman work for? Kruktech Works" in out
    assert "from ingrid-delumb.txt" in out and "4 chunks from caches" in out
    assert out.count("40 chunks cached in") == 2  # the old text's cache is gone
    assert "samkv:" not in out


def test_notebook_answers(executed: Any) -> None:
    _, ingested, asked, full, streamed, chatted, deleted = printed(executed)
    assert "40 chunks cached" in ingested
    assert "Kruktech Works" in asked and "['thea-nilman.txt'," in asked and "\n4 {} " in asked
    assert "Kruktech Works" in full and "100% kept, 100% recomputed" in full
    assert streamed.strip() == "Trulhaven"
    assert "Trulhaven" in chatted and "Theo Homvek" in chatted
    assert "39 chunks cached" in deleted and "n_pruned=0" in deleted


def test_notebook_holds_what_it_prints(executed: Any) -> None:
    """If this fails, execute the notebook again and keep its outputs."""
    kept = printed(nbformat.read(NOTEBOOK, as_version=4))
    assert [_without_times(text) for text in kept] == [
        _without_times(text) for text in printed(executed)
    ]


def _without_times(text: str) -> str:
    return text.split("seconds=")[0]
