"""The Dockerfile: what it names is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from tests.cli.running import ran

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def of(word: str) -> list[str]:
    return [line.removeprefix(word).strip() for line in LINES if line.startswith(f"{word} ")]


def test_what_it_copies_is_there_and_not_ignored() -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {name for line in of("COPY") for name in shlex.split(line)[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_its_extras_are_ours() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (named,) = re.findall(r"'\.\[(.*?)\]'", " ".join(of("RUN")))
    assert {*named.split(",")} <= {*extras}


def test_its_command_has_options_that_exist() -> None:
    (command,) = of("CMD")
    name, *options = re.findall(r'"(.*?)"', command)
    shown = ran(name, "--help")
    assert all(option in shown for option in options if option.startswith("--"))
