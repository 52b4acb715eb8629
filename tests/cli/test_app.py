"""The command line as a whole: its commands, and one line for every mistake."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from samkv_integrations import release
from samkv_integrations.chroma.client import Database
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods.eviction import EVICTIONS, with_budget
from samkv_integrations.serving.grammar import check_json_schema
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.turns import Limits
from samkv_integrations.store.indexed import quotas_of
from tests.cli.running import error_of, ran
from tests.support.models import tiny_model


def test_version() -> None:
    assert ran("--version") == f"samkv {release.version()}\n"


def test_the_package_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["samkv", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("samkv_integrations", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"samkv {release.version()}\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("ask", "Who?", "--fast"), 2),
        (("ask", "Who?", "--dir", "nowhere"), 2),
        (("ask", " "), 2),
        (("ingest", "nothing.txt"), 2),
        (("ingest", ".", "--model", "./nowhere"), 2),
        (("tune", "--questions", "nothing.jsonl"), 2),
        (("ask", "Who?", "--dir", "."), 2),
        (("ask", "Who?", "--top-k", "-1"), 2),
        (("ask", "Who?", "--model", "./nowhere"), 2),
        (("ask", "Who?", "--draft", "-1"), 2),
        (("ask", "Who?", "--hot-bytes", "much"), 2),
        (("ask", "Who?", "--store-bits", "3"), 2),
        (("ask", "Who?", "--dir", ".", "--method", "unknown"), 2),
        (("ask", "Who?", "--dir", ".", "--eviction", "unknown"), 2),
        (("ask", "Who?", "--dir", ".", "--eviction-budget", "0.5"), 2),
        (("doctor", "--dtype", "float8"), 2),
        (("doctor", "--model", "./nowhere"), 2),
        (("quickstart", "--model", "./nowhere"), 2),
        (("serve", "--timeout", "-1"), 2),
        (("serve", "--max-body", "much"), 2),
        (("ingest", ".", "--max-bytes", "much"), 2),
        (("ingest", ".", "--collection", "?"), 2),
        (("store", "budget", "--max-bytes", "much"), 2),
        (("store", "pull", "--bytes", "much"), 2),
    ],
)
def test_neither_the_help_nor_a_refusal_waits_for_torch(
    working_folder: Path, arguments: tuple[str, ...], code: int
) -> None:
    """Torch and transformers take seconds to import: each command imports what it uses."""
    script = (
        f"import sys; sys.argv = {['samkv', *arguments]}\n"
        "from samkv_integrations.cli.app import main\n"
        "try: main()\n"
        "finally: print({'torch', 'transformers', 'chromadb'} & sys.modules.keys())"
    )
    (working_folder / "note.txt").write_text("A document.")
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=working_folder
    )
    assert found.returncode == code, found.stderr
    assert found.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("ask", "--fast"),
            "--fast (Possible options: --chat, --draft, --set); next step: samkv ask",
        ),
        (("ask",), "Missing argument 'QUESTION'; next step: samkv ask --help"),
        (("ask", "a", "b"), "extra argument(s) (b); next step: samkv ask --help"),
        (("ask", "a", "--top-k", "0"), "Invalid value for '--top-k': "),
        (("ask", "a", "--top-k"), "Option '--top-k' requires an argument; next step: samkv "),
        (("store", "repair"), "No such command 'repair'; next step: samkv store --help"),
        (("answer",), "No such command 'answer'; next step: samkv --help"),
        (("--fast",), "No such option: --fast; next step: samkv --help"),
    ],
)
def test_what_is_typed_wrong_is_one_line_too(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in error_of(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("doctor", "--dtype", "float8"), "--dtype=float8; allowed: auto, float32, bfloat16"),
        (
            ("ingest", "nothing.txt"),
            "'nothing.txt' does not exist",
        ),
        (("ingest", "town/picture.png"), "known kinds: .md, .txt, .rst, .csv"),
        (("ingest", "hollow"), "no document (.md, .txt, .rst, .csv"),
        (("ingest", "blank", "--model", "builtin"), "no text in 1 document; give some with"),
        (("ingest", "town", "--chunk-size", "0"), "Invalid value for '--chunk-size'"),
        (("ingest", "town", "--collection", "?"), "'?'"),
        (("ingest", "town", "--collection", "no name"), "collection name 'no name'"),
        (("ask", "Who?", "--dir", "nowhere"), "nowhere does not exist; give the --dir that"),
        (("tune", "--questions", "missing.jsonl"), "'missing.jsonl' does not exist"),
        (("tune", "--questions", "hollow/none.jsonl"), "holds no question"),
        (("tune", "--questions", "town/breltech-shipping.txt"), "breltech-shipping.txt, line 1"),
        (("ask", "Who?", "--method", "magic"), "'magic'; known: a3, ape, auto, cacheblend"),
        (("ask", "Who?", "--compare", "reuse,magic"), "unknown method 'magic'"),
        (("ask", "Who?", "--set", "select.top=3"), "known: recompute.first"),
        (("ask", "Who?", "--set", "recompute.first=many"), "valid integer"),
        (("ask", "Who?", "--method", "samkv-fusion", "--set", "select.bias=so"), "valid boolean"),
        (("ask", "Who?", "--set", "recompute.first=-1"), "it must be 0 or more"),
        (
            ("ingest", "town", "--store-bits", "3", "--model", "builtin"),
            "--store-bits=3; allowed: 4, 8, 16",
        ),
        (("store", "stats", "--dir", "nowhere"), "nowhere/kv does not exist"),
        (("store", "sync", "--dir", "nowhere"), "nowhere/chroma holds no Chroma database"),
        (("quickstart",), "examples/paragraphs is not a folder"),
        (("quickstart", "--documents", "hollow"), "no document"),
        (("quickstart", "--documents", "blank"), "no text in 1 document"),
    ],
)
def test_mistakes(
    town: Path, working_folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    if "--dir" not in arguments:
        Database(working_folder / ".samkv/chroma").collection("documents", create=True)
    (town / "picture.png").touch()
    (working_folder / "hollow").mkdir()
    (working_folder / "hollow/none.jsonl").write_text("\n")
    (working_folder / "blank").mkdir()
    (working_folder / "blank/blank.txt").write_text(" \n")
    assert expected in error_of(*arguments)


def test_the_help_of_ask_shows_everyday_flags_first() -> None:
    shown = ran("ask", "--help")
    assert all(f" {name} " in shown for name in ("--eviction", "--eviction-budget", "--store-bits"))
    everyday, _, further = shown.partition("Model, caches and engine:")
    assert all(f" {name} " in everyday for name in ("--model", "--top-k", "--method", "--timeout"))
    assert all(f" {name} " in further for name in ("--dtype", "--hot-bytes", "--draft"))
    assert len(everyday.splitlines()) <= 30, "a screen of 24 lines, with the header"


def test_the_help_of_ingest_has_a_group_for_reading() -> None:
    shown = ran("ingest", "--help")
    reading = shown.partition("Reading documents:")[2].partition("Model, caches and engine:")[0]
    flags = ("--code", "--encoding", "--overlap", "--max-file", "--max-pages", "--read-seconds")
    assert all(f" {name} " in reading for name in flags) and "--dtype" not in reading


@pytest.mark.parametrize(
    ("option", "mistake"),
    [
        ("budget_ratio", lambda: with_budget(EVICTIONS["h2o"], 2.0)),
        ("json_schema", lambda: check_json_schema([])),
        ("max_batch", lambda: Limits(max_batch=0)),
        ("quota", lambda: quotas_of(1)),
        ("scheduler", lambda: Scheduler.of(tiny_model(), 1)),
        ("stop_ids", lambda: tiny_model().end_ids("ab")),
    ],
)
def test_an_error_says_which_option_is_wrong(option: str, mistake: Callable[[], object]) -> None:
    """Commands write it as their flag, the server as the field of the body."""
    with pytest.raises(InvalidOption) as raised:
        mistake()
    assert raised.value.option == option


def test_an_error_names_flags_and_not_arguments(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    ask = ("ask", "Who?", "--method", "reuse")
    evict = (*ask, "--eviction", "h2o", "--eviction-budget", "7")
    assert "--eviction-budget=7.0 of 'h2o'; it must be above 0" in error_of(*evict)
