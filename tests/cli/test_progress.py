"""The bar of an ingest."""

from __future__ import annotations

import re
import sys
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from tqdm.auto import tqdm

from samkv_integrations.cli.progress import IngestBar
from samkv_integrations.ingest.chunks import ChunkPage
from samkv_integrations.store.chunk import ChunkRef
from tests.cli.running import run


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def page(n_files: int, n_bytes: int) -> ChunkPage:
    return ChunkPage(ids=[], texts=[], rows=[], n_files=n_files, n_bytes=n_bytes)


def chunk(key: str, n_tokens: int, state: str = "missed") -> ChunkRef:
    return ChunkRef(key=key, text=key, token_ids=tuple(range(n_tokens)), state=state)


def test_tokens_of_unread_files_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with IngestBar(8, 4000, is_shown=True) as bar:
        first = page(2, 1000)
        bar.begin(first, [chunk("a", 100), chunk("a", 100), chunk("b", 50, "cached")])
        bar.update(100)
        bar.end(first)
        # 100 are missed; the other 3000 bytes have 250 tokens for each 1000
        assert re.search(r"2/8 files: .* 100/850 \[.*<.*tokens/s\]", terminal.getvalue())
        last = page(8, 4000)
        bar.begin(last, [chunk("c", 300)])
        bar.update(300)
        bar.end(last)
    assert re.search(r"8/8 files: 100%.* 400/400 ", terminal.getvalue())


def test_files_are_counted_within_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("samkv_integrations.cli.progress.tqdm", partial(tqdm, mininterval=0))
    with IngestBar(8, 4000, is_shown=True) as bar:
        bar.begin(page(8, 4000), [chunk("a", 100), chunk("b", 100)])
        bar.update(100)
    assert "4/8 files" in terminal.getvalue()


@pytest.mark.parametrize(("options", "is_shown"), [((), True), (("--json",), False)])
def test_there_is_one_on_a_terminal_without_json(
    options: tuple[str, ...], is_shown: bool, town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("samkv_integrations.cli.progress.tqdm", partial(tqdm, file=terminal))
    run("ingest", str(town), *options)
    assert ("6/6 files: 100%" in terminal.getvalue()) is is_shown
