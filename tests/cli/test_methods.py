"""``samkv methods``."""

from __future__ import annotations

from samkv_integrations import EVICTIONS, METHODS
from tests.cli.running import ran, rows_of


def test_methods_lists_all_of_them() -> None:
    shown = ran("methods")
    assert all(name in shown for name in (*METHODS, *EVICTIONS))
    rows = rows_of("methods")
    assert [row["name"] for row in rows if row["kind"] == "method"] == list(METHODS)
    assert [row["name"] for row in rows if row["kind"] == "eviction"] == list(EVICTIONS)
    assert all(list(row) == ["name", "kind", "paper", "summary"] for row in rows)
