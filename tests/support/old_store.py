"""A store as format version 1 wrote it, with nothing from the package but a fingerprint."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from samkv_integrations.cache.chunk import Fingerprint
from tests.support.chunks import tiny_fingerprint


def old_fields(fingerprint: Fingerprint) -> dict[str, object]:
    """The fields that version 1 had."""
    fields = {k: v for k, v in asdict(fingerprint).items() if k != "store_bits"}
    return fields | {"code_bits": 2, "format_version": 1}


def old_digest(fields: dict[str, object]) -> str:
    named = {k: v for k, v in fields.items() if k != "model"}
    return hashlib.blake2b(json.dumps(named, sort_keys=True).encode(), digest_size=16).hexdigest()


OLD_FIELDS = old_fields(tiny_fingerprint())
OLD_DIGEST = old_digest(OLD_FIELDS)


def old_key(secret: bytes, token_ids: Sequence[int], digest: str = OLD_DIGEST) -> str:
    """The key that version 1 gives a chunk in a store without a namespace."""
    named = hashlib.blake2b(key=secret, digest_size=16)
    for part in (b"", digest.encode()):
        named.update(len(part).to_bytes(8, "little") + part)
    named.update(struct.pack(f"<{len(token_ids)}i", *token_ids))
    return named.hexdigest()


def old_file(key: str, n_tokens: int, fields: dict[str, object] = OLD_FIELDS) -> bytes:
    """A file as version 1 begins one; its tensors are left out, as nobody gets to them."""
    metadata = {
        "format_version": "1",
        "fingerprint": old_digest(fields),
        "fingerprint_fields": json.dumps(fields, sort_keys=True, separators=(",", ":")),
        "key": key,
        "n_tokens": str(n_tokens),
    }
    text = json.dumps({"__metadata__": metadata}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text.encode() + bytes(1000)


def old_store(
    folder: Path,
    fingerprint: Fingerprint | None = None,
    token_ids: Sequence[Sequence[int]] = ([5, 6, 7, 8], [9, 10]),
) -> dict[str, Sequence[int]]:
    """Makes ``folder`` a store of chunks, of the tiny model if not said; token ids by key."""
    fields = OLD_FIELDS if fingerprint is None else old_fields(fingerprint)
    digest = old_digest(fields)
    secret, root = bytes(range(32)), folder / digest
    root.mkdir(parents=True)
    (folder / "store.json").write_text('{"format_version": 1}')
    (folder / "secret").write_bytes(secret)
    (root / "fingerprint.json").write_text(json.dumps(fields, indent=2))
    chunks = {old_key(secret, ids, digest): ids for ids in token_ids}
    for key, ids in chunks.items():
        (root / key[:2]).mkdir(exist_ok=True)
        (root / key[:2] / f"{key}.txt").write_text("Old text.")
        (root / key[:2] / f"{key}.safetensors").write_bytes(old_file(key, len(ids), fields))
    return chunks
