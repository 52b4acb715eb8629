"""``samkv serve`` as users run it: a process of its own, on the sample documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from samkv_integrations.cli.app import app

ROOT = Path(__file__).parents[2]
START_S = 120.0
READY = re.compile(r"^samkv: serving (\S+) on (http://\S+)/v1$")


@contextmanager
def serving_town(folder: Path) -> Iterator[str]:
    """Serves collection ``notes`` from ``folder`` without keys; gives the address, without path."""
    ingested = CliRunner().invoke(
        app, ["ingest", str(ROOT / "examples/town_records"), "--collection", "notes",
              "--dir", str(folder)],
    )  # fmt: skip
    assert ingested.exit_code == 0, ingested.output
    code = "from samkv_integrations.cli.app import main; main()"
    served = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--collection", "notes", "--port", "0",
         "--dir", str(folder)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    patience = threading.Timer(START_S, served.kill)
    patience.start()
    try:
        address = _address(served)
        patience.cancel()
        yield address
    finally:
        patience.cancel()
        served.kill()
        served.wait()


def _address(served: subprocess.Popen[str]) -> str:
    """What it says once it answers; what it says later is thrown away, not left in the pipe."""
    assert served.stderr is not None
    said = []
    for line in served.stderr:
        if ready := READY.fullmatch(line.strip()):
            threading.Thread(target=served.stderr.read, daemon=True).start()
            return ready[2]
        said.append(line)
    raise AssertionError(f"it did not start: {''.join(said)}")
