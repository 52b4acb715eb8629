"""The page about missing hits: every reason is on it, and what it says and quotes holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations.errors import MISS_REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", MISS_REASONS)
def test_every_reason_of_a_miss_is_explained(reason: str) -> None:
    assert f"\n| `{reason}` | " in PAGE
