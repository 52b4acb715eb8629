"""Sizes as people write them: ``20GB``."""

from __future__ import annotations

import re

from samkv_integrations.cache.index import MOST
from samkv_integrations.errors import InvalidOption

_UNITS = {"": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for kind, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def bytes_of(option: str, text: str) -> int:
    """The number of bytes of a size with or without a unit: ``500MB``, ``1.5 GiB``, ``4096``.

    Raises InvalidOption, which names ``option``, for something else, or what no file can have.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not 1 <= (size := float(found[1]) * unit) < MOST:
        raise InvalidOption(f"{option} {text}; give a number of bytes, or a size such as 20GB")
    return int(size)
