"""The benchmark `serve`: its rows, and the server that it starts and stops."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import rows_of, serving
from samkv_integrations.cli.formatting import Row
from samkv_integrations.cli.serve import KEYS_VARIABLE
from tests.bench.running import ran


def outcome(ttft_s: float, **fields: Any) -> Row:
    given = {"error": None, "ttft_s": ttft_s, "token_s": 0.1, "wait_s": 0.5, "ran": "epic",
             "completion_tokens": 3, "prompt_tokens": 10, "cached_tokens": 8}  # fmt: skip
    return {**given, **fields}


def test_a_row_is_of_what_was_answered_over_the_time_of_the_methods_own_turns() -> None:
    outcomes = {
        "auto": [outcome(1.0), outcome(2.0), outcome(3.0, token_s=None), {"error": "429 busy"}],
        "recompute": [outcome(8.0)],
    }
    row, full = rows_of(outcomes, {"auto": 4.0, "recompute": 8.0}, 8)
    assert (row["requests"], row["answered"], row["errors"]) == (4, 3, {"429 busy": 1})
    assert (row["requests_per_s"], row["output_tokens_per_s"]) == (3 / 4, 9 / 4)
    assert (row["ttft_p50_s"], row["ttft_p90_s"]) == (2.0, pytest.approx(2.8))
    assert (row["token_p50_s"], row["ran"]) == (pytest.approx(0.1), {"epic": 3})
    assert (row["ttft_ratio"], full["ttft_ratio"]) == (0.25, 1.0)


PRETEND = """
import os, sys, time
folder = sys.argv[sys.argv.index("--dir") + 1]
open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
print("loading", file=sys.stderr)
if "--fail" in sys.argv:
    sys.exit("samkv: no model of that name")
print("samkv: serving tiny on http://127.0.0.1:4321/v1", file=sys.stderr)
for _ in range(10_000):
    print("a line of a log", file=sys.stderr)
open(os.path.join(folder, "logged"), "w").close()
time.sleep(600)
"""


def pretend(folder: Path, *options: str) -> Any:  # noqa: ANN401
    command = (sys.executable, "-c", PRETEND)
    return serving(("--dir", str(folder), *options), command=command)


def has_ended(folder: Path) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_server_of_ones_own_ends_with_what_it_was_for(tmp_path: Path) -> None:
    with pretend(tmp_path) as url:
        assert url == "http://127.0.0.1:4321/v1"
        assert not has_ended(tmp_path)
    assert has_ended(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_ends_whatever_happens(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), pretend(tmp_path):
        raise error
    assert has_ended(tmp_path)


@pytest.mark.slow  # a server process, and eight prompts of long documents
def test_it_measures_the_real_server(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # keys of another server of the user, which nobody would have for this one
    monkeypatch.setenv(KEYS_VARIABLE, "key-of-another")
    found = json.loads(
        ran("serve", "--methods", "reuse,recompute", "--questions", "long", "--requests", "2",
            "--rounds", "1", "--concurrency", "2", "--max-tokens", "4", "--json")
    )  # fmt: skip
    assert found["model"] == "builtin"
    reuse, recompute = found["rows"]
    assert (reuse["label"], reuse["ran"]) == ("reuse", {"reuse": 2})
    assert (recompute["label"], recompute["ran"]) == ("recompute", {"recompute": 2})
    assert reuse["errors"] == recompute["errors"] == {}
    # the same prompts, of which the one method has nearly everything from caches; the other has
    # what stands before the first chunk, as any answer after the first one does
    assert reuse["prompt_tokens"] == pytest.approx(recompute["prompt_tokens"], abs=4)
    assert reuse["cached_tokens"] > 0.8 * reuse["prompt_tokens"]
    assert recompute["cached_tokens"] < 0.02 * recompute["prompt_tokens"]
    assert reuse["wait_p50_s"] is not None and reuse["token_p50_s"] > 0
    assert not list(working_folder.iterdir())
