"""The token ids that a chunk file of an older format version holds, whatever model it is of.

A key is a hash of them, so they say whose file it is. (`chunk_head` reads files of this version.)
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from zlib import crc32

import numpy as np

from samkv_integrations.cache.checked_file import (
    BAD_JSON,
    MAX_HEADER_BYTES,
    NotAFile,
    open_regular,
)


def token_ids_in(path: Path) -> list[int] | None:
    """The token ids in a file of version 1 to 3; None if there are none, or they are damaged.

    In these versions the first checksum is that of the header, and the second that of the token
    ids. They are CRC-32, so damage shows and intent does not.

    Raises OSError if the operating system cannot read it.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            n_bytes = int.from_bytes(prefix, "little")
            if n_bytes > min(MAX_HEADER_BYTES, size):
                return None
            header = prefix + file.read(n_bytes)
            table = json.loads(header[8:])
            (start, _), (first, last) = (
                table[name]["data_offsets"] for name in ("checksums", "token_ids")
            )
            if not 0 <= first <= last <= size:
                return None
            file.seek(len(header) + start)
            of_header, of_ids = struct.unpack("<2I", file.read(8))
            file.seek(len(header) + first)
            ids = file.read(last - first)
        is_sound = crc32(header) == of_header and crc32(ids) == of_ids
        return np.frombuffer(ids, dtype="<i4").tolist() if is_sound else None
    except (FileNotFoundError, NotAFile, struct.error, *BAD_JSON):
        return None
