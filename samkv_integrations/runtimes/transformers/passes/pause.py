"""Pauses between the parts of a long pass, in which other passes may run."""

from __future__ import annotations

from collections.abc import Callable

Pause = Callable[[], None]
"""Called before each layer. It may run other passes, and may raise, which ends the pass.

No pass calls it inside `LayeredModel.decoding`, whose products must not reach other passes.
"""


def no_pause() -> None:
    """The pause of a pass that must not be interrupted: it does nothing."""
