"""The picture of a quality run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot


def total(label: str, f1: float, kept: float, ttft: float) -> dict[str, Any]:
    return {"label": label, "f1": f1, "kept_ratio": kept, "ttft_ratio": ttft,
            "kv_bytes": 10 * kept, "full_kv_bytes": 10}  # fmt: skip


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    rows = [total("recompute", 0.9, 1, 1), total("reuse", 0.9, 1, 0.3),
            total("reuse 2", 0.9, 1, 0.3),
            *(total(f"samkv-guided @ {b}", 0.7 + b, b, 0.3) for b in (0.1, 0.2))]  # fmt: skip
    plot.draw(rows, tmp_path / name, "a title")
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    if name.endswith(".svg"):
        for text in ("samkv-guided @ 0.1", "samkv-guided", "reuse 2", "a title", "kept ratio"):
            assert f"<!-- {text} -->" in content.decode()
