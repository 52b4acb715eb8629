"""``samkv inspect``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.running import ran, rows_of
from tests.support.records import RECORDS

QUESTION = RECORDS[0].question
HOW = ("--method", "samkv-guided", "--top-k", "3")


@pytest.fixture
def ingested(town: Path) -> Path:
    """Its first record says what no terminal may do."""
    record = town / "breltech-shipping.txt"
    record.write_text(record.read_text().strip() + " \x1b[31mRed.\n")
    ran("ingest", str(town))
    return town


def test_it_shows_what_became_of_each_token(ingested: Path) -> None:
    shown = ran("inspect", QUESTION, *HOW)
    (table, text) = shown.split("What became of each token at any layer: ")
    assert "breltech-shipping.txt" in table and "in full" in table
    assert "kept from its cache" in text and "<recomputed>" in text
    assert f"Question: {QUESTION}" in text.replace("<", "").replace(">", "")
    assert f"samkv-guided: {RECORDS[0].workers}\nfull prefill: {RECORDS[0].workers}" in text
    assert "(the same answer)" in text
    sparse = ran("inspect", QUESTION, *HOW, "--eviction", "quest")
    assert re.search(r"later tokens go on with \d+ % of the chunks' tokens \(quest\)", sparse)
    assert "\x1b" not in shown and "\N{REPLACEMENT CHARACTER}[31mRed." in shown
    of_layer = ran("inspect", QUESTION, *HOW, "--layer", "7")
    assert "at layer 7: " in of_layer and of_layer.split("What became")[0] != table


def test_json_and_the_page(ingested: Path, tmp_path: Path) -> None:
    (row,) = rows_of("inspect", QUESTION, *HOW, "--html", str(tmp_path / "page.html"))
    assert (row["answer"], row["same"], row["n_layers"]) == (RECORDS[0].workers, True, 8)
    assert [chunk["name"] for chunk in row["chunks"]][0] == "breltech-shipping.txt"
    assert row["report"]["method"] == "samkv-guided"
    assert row["full_report"]["recompute_ratio"] == 1
    for report in (row["report"], row["full_report"]):  # 0 would say that it was measured
        assert not {"ttft_s", "wait_s", "decode_tokens_per_s"} & set(report)
    page = (tmp_path / "page.html").read_text()
    assert QUESTION in page and "http://" not in page and "https://" not in page


def test_what_is_missing_is_said(ingested: Path) -> None:
    ran("store", "forget", "--text", RECORDS[1].text)
    shown = ran("inspect", RECORDS[1].question, *HOW)
    assert "without a usable cache: 1 absent" in shown and "no cache" in shown
    assert "!computed, without a usable cache!" in shown
