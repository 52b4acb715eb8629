"""``samkv serve``: a process that answers, and what it refuses to begin with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.request import Request, urlopen

import pytest

from samkv_integrations.cli.serve import KEYS_VARIABLE
from samkv_integrations.server import run as run_module
from samkv_integrations.server import tenancy as tenancy_module
from tests.cli.running import error_of, ran
from tests.support.records import RECORDS

PATIENCE_S = 120
COMMAND = [sys.executable, "-c", "from samkv_integrations.cli.app import main; main()", "serve"]
PROMPT = f"Documents:\n\n{RECORDS[0].text}\n\nQuestion: {RECORDS[0].question}\nAnswer:"


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address; killed in the end."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.fullmatch(
                r"samkv: serving (\S+) on (http://127\.0\.0\.1:\d+)/v1\n", line
            ):
                yield process, found[2]
                break
        else:
            pytest.fail("it never served")
    finally:
        process.kill()
        process.communicate()


def posted(address: str, path: str, body: dict[str, Any], **headers: str) -> Any:
    """An open response."""
    sent = json.dumps(body).encode()
    asked = Request(address + path, sent, {"content-type": "application/json", **headers})
    return urlopen(asked, timeout=PATIENCE_S)


@pytest.fixture
def documents(working_folder: Path) -> Path:
    folder = working_folder / "documents"
    folder.mkdir()
    for record in RECORDS:
        (folder / f"{record.name}.txt").write_text(record.text)
    ran("ingest", str(folder), "--collection", "notes")
    return folder


def test_it_answers_from_what_was_ingested_and_ends_what_it_began(documents: Path) -> None:
    asked = {"model": "builtin", "prompt": PROMPT, "max_tokens": 8}
    with serving("--collection", "notes") as (process, address):
        with posted(address, "/v1/completions", asked) as reply:
            found = json.load(reply)
        assert found["choices"][0]["text"].strip(" .") == RECORDS[0].workers
        assert found["samkv"]["found"] == 1  # so few tokens are computed sooner than read
        endless = {"model": "builtin", "prompt": "Documents:\n\n[Dunlux", "max_tokens": 300}
        with posted(address, "/v1/completions", endless | {"stream": True}) as stream:
            first = stream.readline()
            process.send_signal(signal.SIGTERM)
            rest = stream.read()
        process.wait(PATIENCE_S)
    assert first.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")
    assert rest.count(b"data: ") > 20
    assert process.returncode in (143, -signal.SIGTERM)


def test_namespaces_have_equal_parts_of_the_memory(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(run_module, "run", lambda *_: None)
    monkeypatch.setattr(
        tenancy_module, "Tenancy", lambda *_, **options: served.append(options) or MagicMock()
    )
    keys = Path("keys")
    keys.write_text("".join(f"sk-of-somebody-{n} {name}\n" for n, name in enumerate("aab")))
    sizes = ("--prefix-bytes", "1MB", "--hot-bytes", "2000")
    ran("serve", "--port", "0", "--api-keys", str(keys), *sizes)
    ran("serve", "--port", "0", *sizes)
    assert [options["prefix_bytes"] for options in served] == [500_000, 1_000_000]
    assert [options["hot_bytes"] for options in served] == [1000, 2000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 without API keys"),
        (("--port", "70000"), "--port 70000; it must be from 0 to 65535"),
        (("--api-keys", "nowhere.txt"), "--api-keys nowhere.txt cannot be read"),
        (("--collection", "notes"), ".samkv does not exist"),
        (("--method", "reus"), "did you mean 'reuse'?"),
        (("--max-batch", "0"), "Invalid value for '--max-batch'"),
        (("--max-waiting", "-1"), "Invalid value for '--max-waiting'"),
        (("--max-kv", "many"), "--max-kv=many"),
        (("--max-body", "0"), "--max-body=0"),
        (("--prefix-bytes", "much"), "--prefix-bytes=much"),
        (("--timeout", "0"), "--timeout=0.0"),
        (("--model", "nowhere/at-all"), "nowhere/at-all"),
        (("--namespace", "\udcff"), "namespace"),
    ],
)
def test_what_it_does_not_begin_with(
    arguments: tuple[str, ...],
    message: str,
    working_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module.Server, "run", lambda *_: pytest.fail("it serves"))
    port = () if "--port" in arguments else ("--port", "0")
    assert message in error_of("serve", *port, *arguments)


def test_a_file_of_keys_and_the_variable(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = working_folder / "keys"
    file.write_text("sk-of-the-red-team red\n")
    monkeypatch.setenv(KEYS_VARIABLE, "sk-of-the-red-team red")
    assert "are both given" in error_of("serve", "--api-keys", str(file))
    monkeypatch.delenv(KEYS_VARIABLE)
    file.write_text("# none\n")
    assert "holds no key" in error_of("serve", "--api-keys", str(file))
    file.write_text("sk-of-the-red-team red notes\n")
    said = error_of("serve", "--api-keys", str(file))
    assert "a line of namespace 'red' with notes: " in said and "holds no Chroma database" in said
    (working_folder / ".samkv").mkdir()
    unseen = error_of("serve", "--api-keys", str(file), "--collection", "letters")
    assert "--collection letters: every key names a namespace" in unseen


def test_lenient_is_a_setting(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[bool]()
    monkeypatch.setattr(run_module, "run", lambda *_: None)
    monkeypatch.setattr(
        "samkv_integrations.server.app.create_app",
        lambda _tenancy, _keys, settings: made.append(settings.is_lenient),
    )
    ran("serve", "--port", "0")
    ran("serve", "--port", "0", "--lenient")
    assert made == [False, True]
