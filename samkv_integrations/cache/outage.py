"""A store that fails while prompts are answered: it is survived, and said once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from samkv_integrations.errors import SamkvError, StoreError

_log = logging.getLogger(__name__)
_OF_THE_STORE = (
    "the store fails (%s); prompts are answered all the same, from the text of what it cannot "
    "give. This is said once"
)


class Outage:
    """What one engine does about a store that fails under it: a prompt needs no store.

    Safe to use from many threads.

    Args:
        says: what is logged, with a place for the error.
    """

    def __init__(self, says: str = _OF_THE_STORE) -> None:
        self._says = says
        self._lock = threading.Lock()
        self._has_warned = False

    @contextmanager
    def survived(self) -> Iterator[None]:
        """A block that a `StoreError` ends, and no more: it is told instead of raised."""
        try:
            yield
        except StoreError as error:
            self.tell(error)

    def tell(self, error: SamkvError) -> None:
        """Log what failed: a warning the first time, at DEBUG from then on."""
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        _log.log(
            logging.WARNING if is_first else logging.DEBUG,
            self._says,
            error,
        )
