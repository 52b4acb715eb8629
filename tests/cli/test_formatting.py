"""Figures as text, and the commit that they name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from samkv_integrations import formatting


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.size(999), "999 B"),
        (formatting.size(1500), "1.5 kB"),
        (formatting.size(2e12), "2.0 TB"),
        (formatting.size(1.96e15), "2.0 PB"),
        (formatting.size(5e18), "5000.0 PB"),
        (formatting.seconds(0.0421), "42 ms"),
        (formatting.seconds(1.25), "1.2 s"),
        (formatting.count(0, "unused cache"), "0 unused caches"),
        (formatting.count(1, "chunk"), "1 chunk"),
        (formatting.count(2, "chunk"), "2 chunks"),
        (formatting.percent(0.155), "16 %"),
        (formatting.percent(None), "-"),
        (formatting.ratio(0.1234), "0.12"),
    ],
)
def test_figures_for_people(shown: str, expected: str) -> None:
    assert shown == expected


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
