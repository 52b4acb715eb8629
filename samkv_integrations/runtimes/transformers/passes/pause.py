"""Pauses between the parts of a long pass, in which other passes may run."""

from __future__ import annotations

from collections.abc import Callable

Pause = Callable[[], None]
"""Called before each layer. It may run other passes, and may raise, which ends the pass.

No pass calls it within `LayeredModel.decoding`, whose products the other passes must not take.
"""


def no_pause() -> None:
    """For a pass that runs in one go."""
