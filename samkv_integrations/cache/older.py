"""Folders of older format versions: nothing is read of them but whose they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samkv_integrations.cache.chunk import (
    FORMAT_VERSION,
    Fingerprint,
    chunk_key,
    digest_of,
    normalise,
)
from samkv_integrations.cache.files import cannot, remove
from samkv_integrations.cache.named_ids import token_ids_in

# What an older cache shares with one that would be made now, if it is of the same model and text;
# weights and RoPE were hashed in another way.
_MODEL_FIELDS = ("tokenizer", "dtype", "prefix", "n_layers", "n_heads", "head_dim")
_TEXT_NAME = re.compile(r"([0-9a-f]{32})\.txt(\..*\.tmp)?")


def is_older(folder: Path) -> bool:
    """Whether a folder of a fingerprint is of an older version: they had a file of its fields."""
    return (folder / "fingerprint.json").exists()


def folders(store: Path) -> list[Path]:
    """The folders of older fingerprints."""
    try:
        names = sorted(os.listdir(store))
    except OSError as error:
        raise cannot("read", store, error) from error
    return [store / n for n in names if re.fullmatch("[0-9a-f]{32}", n) and is_older(store / n)]


def fields_of(folder: Path) -> dict[str, Any]:
    """The fields of an older fingerprint, empty if unknown."""
    try:
        fields = json.loads((folder / "fingerprint.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    is_known = isinstance(fields, dict) and "model" in fields and digest_of(fields) == folder.name
    return fields if is_known else {}


def version_with(
    store: Path, secret: bytes, namespace: str, like: Fingerprint, token_ids: Sequence[int]
) -> int | None:
    """The older format version in which there is a cache of these tokens by the same model."""
    with suppress(OSError):
        for entry in os.scandir(store):
            folder = Path(entry.path)
            if not is_older(folder):
                continue
            fields = fields_of(folder)
            if all(fields.get(name) == getattr(like, name) for name in _MODEL_FIELDS):
                key = chunk_key(secret, namespace, folder.name, token_ids)
                if _file(folder, key).is_file():
                    return int(fields.get("format_version", FORMAT_VERSION))
    return None


def totals(store: Path) -> list[tuple[dict[str, Any], int, int]]:
    """(fields, chunks, bytes) of each older fingerprint."""
    found = []
    for folder in folders(store):
        sizes = []
        for file in folder.glob("??/*.safetensors"):
            with suppress(FileNotFoundError):  # deleted by another process since it was listed
                sizes.append(file.stat().st_size)
        found.append((fields_of(folder), len(sizes), sum(sizes)))
    return found


def delete(store: Path, keys: Sequence[str]) -> int:
    """Delete chunks and their texts; how many there were."""
    n_found = 0
    for folder in folders(store):
        for key in keys:
            if re.fullmatch("[0-9a-f]{32}", key) and (parts := _parts(folder, key)):
                n_found += 1
                for part in parts:
                    remove(part)
    return n_found


def forget(
    store: Path,
    secret: bytes,
    namespace: str,
    is_wanted: Callable[[str], bool],
    token_ids: Sequence[Sequence[int]],
) -> int:
    """See `Store.forget`."""
    n_removed = 0
    for folder in folders(store):
        named = {chunk_key(secret, namespace, folder.name, ids) for ids in token_ids}
        found = {key for key in named if _parts(folder, key)}
        for file, key in _texts(folder):
            if key not in found and is_wanted(_body_in(file)):
                ids = _ids_in(_file(folder, key))
                # no sound cache says that it is of another namespace
                if ids is None or chunk_key(secret, namespace, folder.name, ids) == key:
                    found.add(key)
        for part in (part for key in sorted(found) for part in _parts(folder, key)):
            remove(part)
        n_removed += len(found)
    return n_removed


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.safetensors"


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files that hold texts, temporary ones too, and the keys of their chunks."""
    for file in folder.glob("??/*.txt*"):
        if name := _TEXT_NAME.fullmatch(file.name):
            yield file, name[1]


def _parts(folder: Path, key: str) -> list[Path]:
    """All files of a chunk, temporary ones too; the text, which names the others, last."""
    parts = (folder / key[:2]).glob(f"{key}.*")
    return sorted(parts, key=lambda part: (part.name == f"{key}.txt", part.name))


def _ids_in(file: Path) -> list[int] | None:
    try:
        return token_ids_in(file)
    except OSError as error:
        raise cannot("read", file, error) from error


def _body_in(file: Path) -> str:
    """The body in a file of text; empty if it cannot be read, or was deleted meanwhile."""
    try:
        return normalise(file.read_bytes().decode(errors="surrogatepass"))
    except (OSError, UnicodeDecodeError):
        return ""
