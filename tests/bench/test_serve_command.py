"""The benchmark `serve`: its options, what it writes, and the server that it starts and stops."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import serving
from samkv_integrations.cli.serve import KEYS_VARIABLE
from tests.bench.running import ran
from tests.support.openai_endpoint import Endpoint, Reply, openai_endpoint

COMMAND = ("serve",)
SMALL = ("--requests", "4", "--rounds", "2", "--concurrency", "2")


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with openai_endpoint(
        lambda body: Reply(
            usage={"prompt_tokens": 50, "completion_tokens": 3},
            report={"ran": body["samkv"]["method"], "wait_s": 0.5},
        )
    ) as endpoint:
        yield endpoint


def test_methods_stand_side_by_side_and_json_is_one_object(server: Endpoint) -> None:
    found = json.loads(ran(*COMMAND, "--url", server.url, *SMALL, "--json"))
    assert list(found) == [
        "command", "version", "commit", "model", "hardware", "settings", "rows",
    ]  # fmt: skip
    assert (found["command"], found["model"]) == ("benchmarks serve", "fake")
    assert found["settings"]["url"] == server.url
    assert set(found["hardware"]) == {"cpu", "threads", "torch"}
    rows = found["rows"]
    assert [(row["label"], row["answered"], row["ran"]) for row in rows] == [
        ("auto", 4, {"auto": 4}), ("recompute", 4, {"recompute": 4}),
    ]  # fmt: skip
    assert rows[0]["ttft_ratio_low"] <= rows[0]["ttft_ratio"] <= rows[0]["ttft_ratio_high"]
    assert rows[1]["ttft_ratio"] == 1
    cached = [text for body in server.bodies("samkv/chunks") for text in body["texts"]]
    prompts = [body["prompt"] for body in server.bodies("completions")]
    assert len(prompts) == 2 * (4 + 1) == len(set(prompts))
    assert all(any(text in prompt for text in cached) for prompt in prompts)


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
        ran(*COMMAND, "--methods", "reuse,recompute", "--questions", "long", "--requests", "2",
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
    assert reuse["wait_p50_s"] is not None and reuse["completion_tokens"] > 1
    assert not list(working_folder.iterdir())
