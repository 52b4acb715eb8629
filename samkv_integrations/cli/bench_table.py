"""The rows of a bench of time as a markdown table, ready for docs/results.md."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations import figures
from samkv_integrations.bench import markdown
from samkv_integrations.figures import Row


def time_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """The ``columns`` of ``rows``; their names are written with spaces."""
    cells = [[_cell(name, row[name]) for name in columns] for row in rows]
    return markdown.table([column.replace("_", " ") for column in columns], cells)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") or name == "bytes_read":
        assert isinstance(value, int | float)
        return figures.size(value)
    if name.endswith("tokens_per_s"):
        return f"{value:.1f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
