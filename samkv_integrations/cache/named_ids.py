"""The token ids that a chunk file holds, whatever model and format version it was written by.

A key is a hash of them, so they say whose file it is.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from zlib import crc32

import numpy as np

from samkv_integrations.cache.chunk_file import MAX_HEADER_BYTES


def token_ids_in(path: Path) -> list[int] | None:
    """The token ids in a chunk file; None if there is none, or it is damaged where they are.

    In every format version (docs/format.md) the first checksum is that of the header, and the
    second that of the token ids.

    Raises OSError if the operating system cannot read it.
    """
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            n_bytes = int.from_bytes(prefix, "little")
            if n_bytes > MAX_HEADER_BYTES:
                return None
            header = prefix + file.read(n_bytes)
            table = json.loads(header[8:])
            (start, _), (first, last) = (
                table[name]["data_offsets"] for name in ("checksums", "token_ids")
            )
            file.seek(len(header) + start)
            of_header, of_ids = struct.unpack("<2I", file.read(8))
            file.seek(len(header) + first)
            ids = file.read(max(0, last - first))
        is_sound = crc32(header) == of_header and crc32(ids) == of_ids
        return np.frombuffer(ids, dtype="<i4").tolist() if is_sound else None
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error):
        return None
