"""Figures as text, and the commit that they name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from samkv_integrations import figures


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.size(999), "999 B"),
        (figures.size(1500), "1.5 kB"),
        (figures.size(2e12), "2.0 TB"),
        (figures.size(1.96e15), "2.0 PB"),
        (figures.size(5e18), "5000.0 PB"),
        (figures.seconds(0.0421), "42 ms"),
        (figures.seconds(1.25), "1.2 s"),
        (figures.count(0, "unused cache"), "0 unused caches"),
        (figures.count(1, "chunk"), "1 chunk"),
        (figures.count(2, "chunk"), "2 chunks"),
        (figures.percent(0.155), "16 %"),
        (figures.percent(None), "-"),
        (figures.ratio(0.1234), "0.12"),
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

    (working_folder / "figures.py").write_text("")
    monkeypatch.setattr(figures, "__file__", str(working_folder / "figures.py"))
    assert figures.commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "something else")
    assert figures.commit() is None
    git("add", "figures.py")
    git("commit", "-m", "figures")
    assert figures.commit() == git("rev-parse", "HEAD")
