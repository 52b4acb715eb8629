"""What the pictures of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

from samkv_integrations.errors import InvalidOption, MissingExtra

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers; yellow is left out, too faint on white."""

MARKERS = "os^Dvp*X"


def check(path: Path) -> None:
    """Raise InvalidOption or MissingExtra if no picture can be written to ``path``."""
    if path.suffix not in SUFFIXES:
        raise InvalidOption(f"--plot {path}: it must end in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra.of("matplotlib", "bench") from error
