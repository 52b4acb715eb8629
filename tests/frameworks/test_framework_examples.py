"""The script and the notebook of each framework, run as a user would run them."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.support.notebooks import EXAMPLES, kept_and_executed

FRAMEWORKS = ("llama_index", "langchain")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_script(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{framework}_quickstart.py"), run_name="__main__")
    out = " ".join(capsys.readouterr().out.split())  # an answer begins with a space of its own
    assert out.count("Where was Ingrid Delumb born? Trulhaven") == 3  # asked, streamed, in a chat
    assert "Where was Ingrid Delumb born? Borminster" in out  # after the document changed
    assert "Who does Thea Nilman work for? Kruktech Works" in out
    assert "4 chunks found" in out
    assert out.count("40 chunks cached in") == 2  # the old text's cache is gone
    assert "samkv:" not in out


@pytest.mark.slow  # the scripts do the same
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_notebook_holds_what_it_prints(framework: str) -> None:
    """If this fails, execute the notebook again and keep its outputs.

    But for times, and for sizes, which depend on the dtype that the machine computes in.
    """
    kept, executed = (
        [re.sub(r"[\d.]+ MiB", "MiB", text.split("seconds=")[0]) for text in texts]
        for texts in kept_and_executed(framework)
    )
    assert kept == executed
