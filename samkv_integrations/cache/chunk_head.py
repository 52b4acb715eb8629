"""What a chunk file says about itself, whatever model it is of: enough to index it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samkv_integrations.cache.checked_file import BAD_JSON, CheckedFile
from samkv_integrations.cache.chunk import chunk_key, digest_of
from samkv_integrations.cache.file_format import INDEX


@dataclass(frozen=True, kw_only=True)
class Head:
    """What is known of a chunk without its tensors.

    key: its name, which follows from the rest; that of the file may be another.
    fields: of its fingerprint, by name.
    n_bytes: bytes of the file.
    """

    key: str
    namespace: str
    fields: dict[str, Any]
    token_ids: tuple[int, ...]
    text: str
    n_bytes: int


def read_head(path: Path, secret: bytes) -> Head:
    """The head of a chunk file of this format version and of the store with ``secret``.

    Verified: header, token ids, text, key, and that the file has its full length. Its tensors are
    not looked at. Raises `CacheMiss`.
    """
    with CheckedFile(path, secret) as file:
        try:
            return _head(file, secret)
        except BAD_JSON as error:  # what wrote it was no release
            raise file.corrupt("header") from error


def _head(file: CheckedFile, secret: bytes) -> Head:
    said, n_data = file.metadata, file.size - len(file.header)
    fields = json.loads(said["fingerprint_fields"])
    if file.table["entries"]["data_offsets"][1] != n_data:
        raise file.corrupt("file size")
    file.read_macs(1 + len(INDEX))
    token_ids, text = (_region(file, name, n_data) for name in ("token_ids", "text"))
    ids = tuple(np.frombuffer(token_ids, dtype="<i4").tolist())
    key = chunk_key(secret, said["namespace"], digest_of(fields), ids)
    if (digest_of(fields), key) != (said["fingerprint"], said["key"]):
        raise file.corrupt("key")
    return Head(
        key=key, namespace=said["namespace"], fields=fields, token_ids=ids,
        text=text.decode(errors="surrogatepass"), n_bytes=file.size,
    )  # fmt: skip


def _region(file: CheckedFile, name: str, n_data: int) -> bytearray:
    first, last = file.table[name]["data_offsets"]
    if not 0 <= first <= last <= n_data:
        raise file.corrupt("table")
    data = bytearray(last - first)
    file.read(first, memoryview(data))
    file.check([memoryview(data)], [1 + INDEX.index(name)], name)
    return data
