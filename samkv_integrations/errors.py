"""Every error a user can meet, in one small hierarchy.

A message names the value that was wrong, what is allowed, and the next step, so that it can be
shown as it stands. Mistakes of the caller raise; ``assert`` is for our own invariants only. Many
classes also derive from a builtin exception, such as ValueError.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec

MOST_SHOWN = 80
"""Characters of a wrong value in a message."""


def shown(value: object) -> str:
    """The text of a value in a message, cut after `MOST_SHOWN` characters."""
    if value is ...:
        return "..."
    try:
        text = repr(value)
    except RecursionError:
        text = reprlib.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


@dataclass(frozen=True)
class Given:
    """An option and a value in a message. Python writes ``top_k=-1``, a command ``--top-k=-1``."""

    option: str
    value: object

    def __str__(self) -> str:
        return f"{self.option}={shown(self.value)}"


class SamkvError(Exception):
    """Base of every error raised on purpose by this package.

    args: the message, in parts: texts, and a `Given` for each option with its value.
    """

    def __str__(self) -> str:
        return self.told(str)

    def told(self, write: Callable[[Given], str]) -> str:
        """The message, in which ``write`` gives the text of each option and its value."""
        return "".join(write(part) if isinstance(part, Given) else str(part) for part in self.args)

    @property
    def option(self) -> str | None:
        """The option that is wrong; None if the message does not begin with one."""
        first = self.args[0] if self.args else None
        return first.option if isinstance(first, Given) else None


class UnsupportedModel(SamkvError):
    """The model cannot be served exactly (its positions, attention or layout are not supported)."""


class ModelFailed(SamkvError, RuntimeError):
    """The library that runs the model failed while it computed."""


class EmbeddingFailed(SamkvError, RuntimeError):
    """The embedding of a collection failed: its endpoint, or what it returned."""


class ModelNotFound(SamkvError, LookupError):
    """No model could be loaded under the given name or path."""


class PromptTooLong(SamkvError, ValueError):
    """The prompt, chunks counted at full size, does not fit the model's context window."""


class InvalidChunk(SamkvError, ValueError):
    """A text is empty, is longer than the context window, or has entries beyond ``store_bits``."""


class HandleError(SamkvError, ValueError):
    """A handle in a prompt is broken, or names a chunk that this store does not hold."""


class ChunkNotCached(SamkvError, LookupError):
    """A chunk of the prompt has no usable cache, and the caller asked for an error in that case."""

    @classmethod
    def of(
        cls, what: str, remedy: str = "ingest it again", why: CacheMiss | None = None
    ) -> ChunkNotCached:
        """An error about the chunk ``what``. remedy: the step that makes its cache again.

        The message has the reason of a miss without its detail, which may be a path of a server.
        """
        reason = f" ({why.reason})" if why else ""
        return cls(
            f"{what} has no usable cache{reason}; {remedy}, or use ", Given("on_miss", "text"),
            " or 'compute'",
        )  # fmt: skip


class StoreError(SamkvError):
    """The store cannot be used: wrong folder, wrong format version, not writable."""


class FingerprintMismatch(StoreError):
    """The store holds caches, but only those of another model, dtype or layout."""


class CacheMiss(SamkvError):
    """One chunk cache cannot be used. Never reaches a user: the engine counts the reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in MISS_REASONS, reason
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason

    @property
    def is_damage(self) -> bool:
        """Whether the cache's file is damaged, or belongs to another cache."""
        return self.reason in ("corrupt", "fingerprint")


MISS_REASONS = ("absent", "corrupt", "format", "fingerprint", "tokens", "io")
"""Why a chunk cache could not be used; docs/troubleshooting.md explains each reason."""


class UnknownOption(SamkvError, ValueError):
    """A name (method, option, document folder, collection) that is not one of the known ones."""

    kind = ""

    @classmethod
    def among(cls, kind: str, value: object, known: Iterable[str]) -> UnknownOption:
        """An error that lists the known names of ``kind``, and suggests the most similar one."""
        names = sorted(known)
        hint = meant(value, names)
        error = cls(f"unknown {kind} {shown(value)}; known: {', '.join(names)}{hint}")
        error.kind = kind
        return error

    @property
    def option(self) -> str | None:
        """The option whose value is unknown, such as ``method``; None if a name is unknown."""
        return self.kind if self.kind.isidentifier() else None


def meant(value: object, known: Iterable[str]) -> str:
    """The suffix ``; did you mean ...?`` if ``value`` is close to one of ``known``, else ``""``."""
    nearest = get_close_matches(str(value)[:MOST_SHOWN], known, n=1, cutoff=0.7)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


class InvalidOption(SamkvError, ValueError):
    """An option whose name is known and whose value is not allowed."""

    @classmethod
    def unless_among(cls, name: str, value: object, allowed: Collection[str]) -> None:
        """Raises InvalidOption unless ``value`` is one of ``allowed``."""
        if value not in allowed:
            raise cls(Given(name, value), f"; allowed: {', '.join(allowed)}")


class MissingExtra(SamkvError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtra:
        """An error that names the extra to install."""
        return cls(
            f"{package!r} is not installed; next step: pip install '.[{extra}]' in a clone of "
            f"samkv-integrations, or 'FILE[{extra}]' for the file of its wheel"
        )

    @classmethod
    def unless_installed(cls, extra: str, *packages: str) -> None:
        """Raises MissingExtra unless all packages are installed. Imports none of them."""
        for package in packages:
            if find_spec(package) is None:
                raise cls.of(package, extra)


class AnswerCut(SamkvError):
    """An answer with a JSON schema reached its limit of tokens before its JSON was complete."""


class TimedOut(SamkvError, TimeoutError):
    """An answer took longer than the caller had asked for."""

    def __init__(self, *parts: object) -> None:
        Exception.__init__(self, *parts)  # OSError would read an error number and a text


class ClusterError(SamkvError):
    """The workers of a cluster cannot do their work."""


class Overloaded(SamkvError):
    """Too many answers wait in the queue, or too many JSON schemas are being read."""


class OutOfMemory(SamkvError, MemoryError):
    """The device has no memory for an answer."""

    @classmethod
    def on(cls, device: object) -> OutOfMemory:
        """An error that names the device, and the options that lower its use of memory."""
        return cls(
            f"{device} has no memory left for this answer; retrieve fewer chunks, lower hot_bytes, "
            "or decode fewer answers at a time (max_batch, max_kv_bytes)"
        )


class EmptyInput(SamkvError, ValueError):
    """A folder without documents, an empty collection, an empty question file."""
