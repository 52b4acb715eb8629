"""Processes of a test: commands of ours, what runs below them, and waiting for what they do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 180.0
"""Seconds that anything may take on a busy machine: far longer than it does."""

COMMAND = (sys.executable, "-c", "from samkv_integrations.cli.app import main; main()")
READY = re.compile(r"samkv: serving builtin on (http://127\.0\.0\.1:\d+)/v1\n")
_LOOK_EVERY_S = 0.02


def wait_until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again. Raises AssertionError if it does not hold in time."""
    deadline, pause = time.monotonic() + patience_s, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        pause.wait(_LOOK_EVERY_S)


def children_of(process: int) -> dict[int, str]:
    """The processes below one -> their command lines."""
    parents, lines = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat, line = (entry / "stat").read_text(), (entry / "cmdline").read_text()
            except OSError:  # it has ended
                continue
            number = int(entry.name)
            parents[number] = int(stat.rpartition(")")[2].split()[1])
            lines[number] = line
    found: dict[int, str] = {}
    at = [process]
    while at:
        parent = at.pop()
        at += (below := [number for number, of in parents.items() if of == parent])
        found |= {number: lines[number] for number in below}
    return found


def kill_in_the_middle(process: int) -> int:
    """Kill a worker of a ``samkv ingest --ray`` that is at work on a batch; which process it was.

    Ray names a process after what it does. A stopped one goes on being what it was when it was
    looked at.
    """
    killed: list[int] = []

    def found() -> bool:
        for number, line in children_of(process).items():
            if "CacheWorker" in line and ".submit" in line:
                os.kill(number, signal.SIGSTOP)
                if ".submit" in children_of(process).get(number, ""):
                    os.kill(number, signal.SIGKILL)
                    killed.append(number)
                    return True
                os.kill(number, signal.SIGCONT)
        return False

    wait_until(found, "a worker is at work")
    return killed[0]


def started(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )


def rows_from(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The rows of a command with --json, whose standard output must be one object."""
    try:
        shown, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    rows: list[dict[str, Any]] = json.loads(shown)["rows"]
    return rows


def end(process: subprocess.Popen[str]) -> None:
    """End a command as a user does, or processes of Ray's outlive it."""
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a ``samkv serve``, which is ended in the end."""
    process = started("serve", "--port", "0", *arguments)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := READY.fullmatch(line):
                # a pipe that nobody reads is full at some time, and the server waits to write
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1]
                break
        else:
            raise AssertionError(f"it never served: {''.join(said)}")
    finally:
        end(process)
