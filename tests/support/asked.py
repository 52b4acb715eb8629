"""What engines are asked by the connectors, whichever way that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samkv_integrations.engine import Engine


def listen(monkeypatch: pytest.MonkeyPatch, told: Callable[..., Any]) -> None:
    """Have ``told`` called with a prompt, its chunks and the options before each answer begins.

    It may return other options.
    """
    stream, astream = Engine.stream, Engine.astream

    def listening(self: Engine, prompt: Any, chunks: Any = None, **options: Any) -> Any:
        return stream(self, prompt, chunks, **(told(prompt, chunks, **options) or options))

    async def alistening(self: Engine, prompt: Any, chunks: Any = None, **options: Any) -> Any:
        options = told(prompt, chunks, **options) or options
        return await astream(self, prompt, chunks, **options)

    monkeypatch.setattr(Engine, "stream", listening)
    monkeypatch.setattr(Engine, "astream", alistening)
