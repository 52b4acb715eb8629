"""The README's commands, and curl."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
(COMMANDS,) = re.findall(
    r"```sh\n([^`]*samkv serve[^`]*)```", (ROOT / "README.md").read_text(encoding="utf-8")
)

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def curled(*arguments: str) -> str:
    quiet = ["curl", "--silent", "--show-error", "--max-time", "60", "--noproxy", "*"]
    done = subprocess.run([*quiet, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_readme_are_those_that_are_run_here() -> None:
    lines = [line.partition("#")[0].split() for line in COMMANDS.splitlines()]
    ingest, serve, curl = lines
    assert ingest == "samkv ingest examples/town_records --collection notes".split()
    assert serve == "samkv serve --collection notes".split()
    assert curl[0] == "curl"


@needs_curl
def test_the_curl_of_the_readme(town_address: str) -> None:
    """Against ``samkv serve`` in a process of its own; the port is another one."""
    line = COMMANDS.splitlines()[-1]
    assert "http://127.0.0.1:8000/" in line
    command = shlex.split(line.replace("http://127.0.0.1:8000", town_address))
    answer = json.loads(curled(*command[1:]))
    assert answer["choices"][0]["message"]["content"].strip() == "Vasumex Trading"
    assert answer["samkv"]["reused"] == answer["samkv"]["found"] == 4
    usage = answer["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
