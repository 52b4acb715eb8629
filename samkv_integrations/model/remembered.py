"""Digests of weights, remembered by the files that the weights were loaded from.

A checkpoint of 16 GB is hashed once, not at every start. What is remembered is used only if the
files are, by the system's account of them, those that were hashed: path, size, inode, and the times
of the last write and of the last change of any kind, which no program can set. A file system
whose times do not tell that is not believed, and samples of the contents must agree besides.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path, try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

MIN_BYTES = 2**28
"""Smaller checkpoints are hashed in a fraction of a second, and nothing is written for them."""

_TICK_S = 0.02
"""Longer than a tick of the clock that file systems take times from."""

_SAMPLES, _SAMPLE_BYTES = 32, 4096
"""Slices of each file, spread evenly from its beginning to its end, that have to agree."""

SETTLED_S = 5.0
"""Seconds since the last change of a file before its times tell two contents apart: within a tick
of a file system's clock they could be the same."""

# Arguments of from_pretrained that say where a checkpoint is, and not what becomes of it.
_PLACES = frozenset(
    {"revision", "token", "cache_dir", "local_files_only", "force_download", "proxies"}
)


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of a checkpoint, as they are at one moment.

    files: path, size, inode, time of the last write and of the last change of each. seen_s: when.
    """

    files: tuple[tuple[str, int, int, int, int], ...]
    seen_s: float = field(compare=False)

    @classmethod
    def of(cls, source: str, config: Any, options: Mapping[str, Any]) -> Checkpoint | None:  # noqa: ANN401
        """The files that ``from_pretrained`` reads weights from, if that is certain.

        None for those that are not here yet, and where options or the config choose other files or
        change what is read.
        """
        if options.keys() - _PLACES or getattr(config, "transformers_weights", None):
            return None
        try:
            folder = _folder(source, config, options)
            return None if folder is None else cls._of_files(_weight_files(folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # an index that is none: whoever loads it says so

    @classmethod
    def _of_files(cls, paths: Iterable[Path | str]) -> Checkpoint:
        now, found = time.time(), [(os.path.realpath(path), os.stat(path)) for path in paths]
        return cls(
            tuple(
                (path, at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns) for path, at in found
            ),
            now,
        )

    def again(self) -> Checkpoint | None:
        """The same files now; None if one is gone."""
        try:
            return self._of_files(path for path, *_ in self.files)
        except OSError:
            return None

    @property
    def _is_worth_it(self) -> bool:
        """Whether hashing takes long, and the files' times tell every change."""
        newest_s = max(max(wrote, changed) for _, _, _, wrote, changed in self.files) / 1e9
        n_bytes = sum(size for _, size, *_ in self.files)
        return (
            n_bytes >= MIN_BYTES
            and self.seen_s - newest_s >= SETTLED_S
            and self.again() == self
            and all(times_tell(folder) for folder in {Path(path).parent for path, *_ in self.files})
        )

    def recall(self, loaded_as: str) -> str | None:
        """The digest of weights that were loaded from these files as ``loaded_as``, if known.

        loaded_as: names what decides how files become weights, such as shapes and dtype.
        """
        if not self._is_worth_it:
            return None
        try:
            name = self._name(loaded_as)
            file = os.open(memory_folder() / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(file, "rb") as opened:
                about = os.fstat(opened.fileno())
                is_ours = about.st_uid == os.geteuid() and not about.st_mode & 0o022
                if not (stat.S_ISREG(about.st_mode) and is_ours):
                    return None  # somebody else could have written it
                digest, check = opened.read(200).decode().split()
        except (OSError, ValueError):
            return None
        return digest if check == _check(name, digest) else None

    def remember(self, loaded_as: str, digest: str) -> None:
        """Keep the digest for the next process; what cannot be written is not remembered."""
        if not self._is_worth_it:
            return
        with suppress(OSError, ValueError):
            name = self._name(loaded_as)
            folder = memory_folder()
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{name}.", suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(f"{digest} {_check(name, digest)}\n")
                os.replace(temporary, folder / name)
            except BaseException:
                os.unlink(temporary)
                raise

    def _name(self, loaded_as: str) -> str:
        versions = (torch.__version__, transformers.__version__)  # they turn files into weights
        samples = hashlib.blake2b(digest_size=16)
        for path, size, *_ in self.files:
            with open(path, "rb") as file:
                for index in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                    samples.update(file.read(_SAMPLE_BYTES))
        return _hash(json.dumps([self.files, loaded_as, *versions, samples.hexdigest()]))


def _folder(source: str, config: Any, options: Mapping[str, Any]) -> Path | None:  # noqa: ANN401
    """The folder of a checkpoint: ``source``, or the snapshot of a hub id that is here already."""
    if Path(source).is_dir():
        return Path(source)
    revision = getattr(config, "_commit_hash", None)
    if revision is None:
        return None
    found = try_to_load_from_cache(
        source, "config.json", cache_dir=options.get("cache_dir"), revision=revision
    )
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """The one file of weights, or the index and its shards, in the order of ``from_pretrained``."""
    if (single := folder / SAFE_WEIGHTS_NAME).is_file():
        return [single]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    shards = set(json.loads(index.read_bytes())["weight_map"].values())
    return [index, *(folder / name for name in sorted(shards))]


def times_tell(folder: Path) -> bool:
    """Whether the file system of a folder gives every write a time of its own that stays.

    It is tried on a file that is written to and then given its old time of writing: in the folder,
    or where that is read-only in `memory_folder`. A file system in memory is not tried: it begins
    anew with the machine, and its inodes with it.
    """
    with suppress(OSError):
        at = os.stat(folder).st_dev
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            is_here = mount.split()[2] == f"{os.major(at)}:{os.minor(at)}"
            if is_here and kind.split()[0] in ("tmpfs", "ramfs"):
                return False
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError:
        try:
            file = tempfile.TemporaryFile(dir=memory_folder(), buffering=0)
        except OSError:
            return False
    with file:
        file.write(b"before")
        before = os.fstat(file.fileno())
        time.sleep(_TICK_S)
        file.seek(0)
        file.write(b"after ")
        os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        return os.fstat(file.fileno()).st_ctime_ns > before.st_ctime_ns


def memory_folder() -> Path:
    """Where digests are remembered: among the assets of Hugging Face's cache."""
    return cached_assets_path("samkv_integrations", namespace="weights", subfolder="digests")


def _check(name: str, digest: str) -> str:
    return _hash(f"{name} {digest}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
