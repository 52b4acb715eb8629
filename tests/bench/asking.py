"""Questions over the records, and runs over them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import Result

from benchmarks import datasets, quality, variants
from benchmarks.journal import Journal
from samkv_integrations.eviction import EVICTIONS
from samkv_integrations.model.model import Model
from tests.bench.running import run
from tests.support.records import RECORDS, builtin

EVICTION = next(iter(EVICTIONS))


TIMES = re.compile(r"_s$|^ttft_ratio$|^decode_tokens_per_s$")


def written(path: Path) -> Path:
    contexts = []
    for record in RECORDS:
        title, _, text = record.text.partition("\n")
        contexts.append({"title": title.strip("[]"), "text": text})
    lines = [
        {
            "id": f"q{index}",
            "kind": "odd" if index % 2 else "even",
            "question": RECORDS[index].question,
            "answers": [RECORDS[index].workers if index < 2 else "something else"],
            "contexts": contexts[: 5 + index % 2],
        }
        for index in range(3)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def asked(file: Path, *names: str, **options: Any) -> tuple[quality.QualityConfig, Model]:
    config = quality.QualityConfig(
        questions=datasets.load([str(file)]),
        variants=variants.combine(names or ["recompute"]),
        **options,
    )
    return config, builtin()


def answered(config: quality.QualityConfig, model: Model, folder: Path) -> quality.Result:
    with Journal(folder, config.settings(model)) as journal:
        return quality.run(config, model, journal)


def quality_command(*arguments: str | Path) -> Result:
    return run("quality", *arguments)


def lasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` without times, which no two runs share."""
    return [{k: v for k, v in row.items() if not TIMES.search(k)} for row in rows]
