"""Notebooks, executed as their reader would."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(notebook: Any) -> list[str]:
    return [
        "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@cache
def executed(name: str) -> tuple[Any, Any]:
    """The notebook called ``name`` as it is kept, and executed anew."""
    kept, again = (nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        NotebookClient(
            again, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}
        ).execute()
    return kept, again


def kept_and_executed(name: str) -> tuple[list[str], list[str]]:
    kept, again = executed(name)
    return printed(kept), printed(again)
