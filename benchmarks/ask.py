"""CPU seconds of a ``samkv ask`` before llama.cpp computes, and its memory while it answers.

    python -m benchmarks ask --model FILE.gguf

Paragraphs are ingested once. Each round is a new process, which imports, loads the model, retrieves
and answers over cached chunks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks import options as own
from benchmarks.answer_grid import PARAGRAPHS
from benchmarks.commands import command_line, loaded_model, show_run
from benchmarks.pairs import spread
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli.formatting import Row
from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.model_files import gguf_file_named

QUESTION = "On which river does the village of Bardney sit?"
ROOT = Path(__file__).parents[1]


def ask(
    model: Annotated[str, typer.Option(help="GGUF file or 'smollm2'.")] = "smollm2",
    rounds: Annotated[int, typer.Option(help="Processes that ask.")] = 5,
    top_k: Annotated[int, typer.Option(help="Chunks of the prompt.")] = 5,
    as_json: args.Json = False,
    folder: own.BenchFolder = None,
) -> None:
    """CPU seconds of a question on the command line before its model computes, and its memory."""
    file = gguf_file_named(model)
    if file is None:
        raise InvalidOption(f"model {model!r} is not a GGUF file, and llama.cpp runs nothing else")
    with TemporaryDirectory(dir=folder) as place:
        at = ("--dir", str(Path(place) / "asked"), "--runtime", "llama_cpp", "--n-threads", "1")
        seen = str(Path(place) / "seen.json")
        files = [str(file) for file in sorted(PARAGRAPHS.glob("*.txt"))]
        _samkv(seen, "ingest", *files, "--model", str(file), *at)
        answered = [
            _samkv(seen, "ask", QUESTION, "--top-k", str(top_k), "--max-new-tokens", "32", *at)
            for _ in range(rounds)
        ]
    row: Row = {
        "file_size_bytes": file.stat().st_size,
        "before_cpu_s": str(spread([each["before_cpu_s"] for each in answered])),
        **{name: median(each[name] for each in answered)
           for name in ("anonymous_bytes", "file_bytes")},
    }  # fmt: skip
    loaded = loaded_model(model, "auto", "auto", "llama_cpp")
    show_run(loaded, list(row), [row], as_json=as_json)


def _samkv(seen: str, *arguments: str) -> Row:
    """What was seen of a command."""
    command = [sys.executable, "-m", "benchmarks.watched_ask", seen, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise InvalidOption(f"samkv {arguments[0]} failed: {done.stderr.strip()[-500:]}")
    found: Row = json.loads(Path(seen).read_text(encoding="utf-8"))
    return found


app = command_line(ask)
main = app
