"""Handles in what a prompt holds, which are new each time, as the texts that they stand for."""

from __future__ import annotations

import re

from samkv_integrations import Engine

HANDLE = re.compile(r"\[\[samkv:[0-9a-f]{32}\]\]")
TYPED = f"[[samkv:{'0' * 32}]]"
"""What looks like a handle, and was issued by nobody."""


def issued(engine: Engine, text: str) -> str:
    handle = engine.issue_handle(text)
    assert handle is not None
    return handle


def spelled_out(engine: Engine, text: str) -> str:
    """``text`` with the chunks in place of their handles; of none that was not issued."""

    def chunk(match: re.Match[str]) -> str:
        (body,) = engine.found_in(match[0]) or [match[0]]
        return body

    return HANDLE.sub(chunk, text)
