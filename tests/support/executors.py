"""An asyncio default executor that tells who uses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class Nobody(ThreadPoolExecutor):
    def submit(self, *given: object, **options: object) -> object:  # type: ignore[override]
        raise AssertionError("a thread of asyncio's default executor was asked for")
