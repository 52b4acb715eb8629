"""The page of an inspection: one file of HTML that asks nobody for anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("page.html")
PLACE = "__DATA__"
MOST = 65535
"""What stands for a share of 1."""


def of(summary: Mapping[str, Any], tokens: Mapping[str, Any]) -> str:
    """The page of what was found. All texts in it are data: none of them becomes markup."""
    data = json.dumps({"summary": summary, "tokens": tokens}, ensure_ascii=False, allow_nan=False)
    # what could end the element, or begin a comment, in a document's text
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    before, after = FILE.read_text(encoding="utf-8").split(PLACE)
    return before + safe + after


def shares(values: Tensor) -> Tensor:
    """Numbers from 0 to 1 as whole ones from 0 to `MOST`, two bytes each."""
    return (values.clamp(0, 1) * MOST).round().to(torch.int32).to(torch.uint16)


def packed(values: Tensor) -> str:
    """The bytes of a tensor, little-endian, row after row, as base64."""
    array = values.contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
