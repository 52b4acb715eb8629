"""Figures as text and as JSON, and the commit that they were measured with."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samkv_integrations.release import version

Row = Mapping[str, Any]
"""One row of a table or of a JSON result: column -> value."""

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal acts on instead of showing: control characters except tab and line
break, bidirectional overrides, and lone surrogates."""


def visible(text: str) -> str:
    """The text without characters of `UNSEEN`: documents, answers and file names are untrusted."""
    return UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def in_one_line(text: str) -> str:
    """The `visible` text, its line breaks replaced, too: names of files can hold them."""
    return visible(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def commit() -> str | None:
    """The git commit of the source tree that runs; None if this is not a checkout."""
    folder = Path(__file__).parent
    tracked = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
    head = ["git", "rev-parse", "HEAD"]
    try:
        # an installed copy may lie inside another project's repository, which does not track it
        for command in (tracked, head):
            found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def to_json(
    command: str, model: str | None, rows: Iterable[Row], more: Mapping[str, Any] | None = None
) -> str:
    """The object that ``--json`` writes, with `UNSEEN` escaped. more: further fields."""
    text = json.dumps(
        {
            "command": command,
            "version": version(),
            "commit": commit(),
            "model": model,
            **(more or {}),
            "rows": [dict(row) for row in rows],
        },
        ensure_ascii=False,
        indent=2,
    )
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return "-" if value is None else f"{100 * value:.0f} %"


def ratio(value: float | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    """A number of things, such as ``1 chunk`` or ``2 chunks``. noun: the singular."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def size(n_bytes: float) -> str:
    """Bytes in the decimal unit that suits them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} PB"
