"""What users see stays: names, signatures, fields, rows and bodies of `public.json` are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import public

FROZEN: dict[str, Any] = json.loads(Path(__file__).with_name("public.json").read_text("utf-8"))


def missing(frozen: Any, found: Any, at: str = "") -> list[str]:  # noqa: ANN401
    """What is frozen and not found, or not the same. More may be found."""
    if isinstance(frozen, dict) and isinstance(found, dict):
        return [
            line
            for name, value in frozen.items()
            for line in (
                missing(value, found[name], f"{at} {name}") if name in found else [f"{at} {name}"]
            )
        ]
    if isinstance(frozen, list) and isinstance(found, list):
        return [f"{at} {name}" for name in frozen if name not in found]
    return [] if frozen == found else [f"{at}: {frozen} became {found}"]


@pytest.mark.parametrize("part", FROZEN)
def test_nothing_public_is_gone(part: str) -> None:
    found = {"names": public.names, "rows": public.rows_of_commands, "http": public.http}[part]()
    assert missing(FROZEN[part], found) == []
