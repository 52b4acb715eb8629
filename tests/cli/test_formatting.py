"""The commit that figures name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from samkv_integrations import formatting


def test_commit_is_that_of_a_checkout_and_of_nothing_else(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside a project's folder must not report the project's commit."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (working_folder / "formatting.py").write_text("")
    monkeypatch.setattr(formatting, "__file__", str(working_folder / "formatting.py"))
    assert formatting.commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "something else")
    assert formatting.commit() is None
    git("add", "formatting.py")
    git("commit", "-m", "figures")
    assert formatting.commit() == git("rev-parse", "HEAD")
