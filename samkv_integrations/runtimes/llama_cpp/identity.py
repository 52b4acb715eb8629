"""The digest of a model's files, remembered because reading five gigabytes takes seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from blake3 import blake3


def digest_of(files: Sequence[Path]) -> str:
    """The digest of all bytes of these files, 32 hex digits.

    It is remembered in the user's cache folder, by path, size, times and inode of each file. A file
    that was changed with all these unchanged would keep its old digest.
    """
    facts = [_facts(file) for file in files]
    place = _folder() / f"{blake3(json.dumps(facts[0][0]).encode()).hexdigest(16)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(place.read_text())
        if kept["files"] == facts:
            return str(kept["digest"])
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update_mmap(file)
    found = digest.hexdigest(16)
    with suppress(OSError):  # it is read again the next time
        place.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=place.parent, delete=False) as new:
            json.dump({"files": facts, "digest": found}, new)
        Path(new.name).replace(place)
    return found


def _facts(file: Path) -> list[object]:
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "samkv" / "digests"
