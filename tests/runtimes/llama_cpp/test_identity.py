"""The digest of a model's files: of every byte, remembered while the file is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.runtimes.llama_cpp import identity
from samkv_integrations.runtimes.llama_cpp.identity import digest_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_every_byte_counts_and_the_order_of_parts(folder: Path) -> None:
    one, other = folder / "one", folder / "other"
    one.write_bytes(b"a" * 1000)
    other.write_bytes(b"a" * 999 + b"b")
    digests = {digest_of([one]), digest_of([other]), digest_of([one, other]),
               digest_of([other, one])}  # fmt: skip
    assert len(digests) == 4


def test_a_file_is_read_again_only_if_it_changed(folder: Path, monkeypatch: Any) -> None:
    file, n_read = folder / "model.gguf", 0
    file.write_bytes(b"one")
    hasher = identity.blake3

    class Counting:
        AUTO = hasher.AUTO

        def __new__(cls, *args: Any, **options: Any) -> Any:
            nonlocal n_read
            n_read += bool(options)  # of a file, not of a path
            return hasher(*args, **options)

    monkeypatch.setattr(identity, "blake3", Counting)
    first = digest_of([file])
    assert (digest_of([file]), n_read) == (first, 1)
    os.utime(file, ns=(1, 1))
    assert (digest_of([file]), n_read) == (first, 2)
    file.write_bytes(b"two")
    assert digest_of([file]) != first
    for kept in (folder / "cache").rglob("*.json"):
        kept.write_text("{damaged")
    assert digest_of([file]) != first
    assert n_read == 4


def test_without_a_cache_folder_it_is_read_each_time(folder: Path) -> None:
    (folder / "cache").write_text("not a folder")
    (folder / "model.gguf").write_bytes(b"one")
    assert digest_of([folder / "model.gguf"]) == digest_of([folder / "model.gguf"])
