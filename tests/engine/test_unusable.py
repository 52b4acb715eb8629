"""Caches that an engine cannot use: one warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from samkv_integrations import ChunkStore, Engine
from tests.support.models import tiny_model
from tests.support.tested_runtime import of_transformers_alone

TEXT = "The mill of Orvik was built in 1871 by two brothers."
PROMPT = f"Read: {TEXT}\nQuestion: when?"


def fill(folder: Path, **options: object) -> None:
    namespace = str(options.pop("namespace", ""))
    model = options.pop("model", tiny_model("llama"))
    engine = Engine(model, ChunkStore(folder, namespace=namespace), **options)  # type: ignore[arg-type]
    engine.cache_chunks([TEXT])


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"store_bits": 8}, "store_bits is 4 here and 8 there; next step: ingest again, or give"),
        ({"prefix": "none"}, "another prefix.* next step: ingest again"),
        pytest.param(
            {"model": tiny_model("llama", torch.bfloat16)},
            r"dtype is .*give dtype='bfloat16'",
            marks=of_transformers_alone,
        ),
        ({"model": tiny_model("llama", seed=5)}, "weights is .*next step: ingest again"),
        ({"namespace": "team"}, "namespace '', but there are some in namespace 'team' of .*kv"),
    ],
    ids=["bits", "prefix", "dtype", "model", "namespace"],
)
def test_what_would_match_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, object], expected: str
) -> None:
    fill(tmp_path / "kv", **options)
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path / "kv"), store_bits=4)
    for _ in range(2):
        report = engine.generate(PROMPT, max_new_tokens=1, on_miss="text").report
        assert report.reused == 0
    (message,) = said(caplog)
    assert re.search(expected, message), message


def test_nothing_is_said_where_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "kv")
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path / "kv"))
    engine.generate(PROMPT, max_new_tokens=1)
    engine.generate("Nothing of it in here.", max_new_tokens=1)
    for empty in (ChunkStore(tmp_path / "empty"), ChunkStore(tmp_path / "kv", namespace="new")):
        Engine(tiny_model("llama"), empty).generate("Nothing of it in here.", max_new_tokens=1)
    assert said(caplog) == []
