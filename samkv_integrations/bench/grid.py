"""What a latency run measures: every combination of a few lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from samkv_integrations.bench import shapes
from samkv_integrations.bench.disk import require_cold
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model

PageCache = Literal["warm", "cold"]

PAGE_CACHES: dict[str, tuple[PageCache, ...]] = {
    "warm": ("warm",), "cold": ("cold",), "both": ("warm", "cold"),
}  # fmt: skip
"""Word of the command line -> the states that it names."""

_OVERHEAD = 256
"""Tokens of a prompt around its texts, generously; and a few more between its chunks."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the lists.

    text_tokens: text after the chunks that is of none. cached_share: of the chunks, how many
        are in the store when the first question comes.
    """

    n_chunks: int
    chunk_tokens: int
    text_tokens: int
    cached_share: float
    page_cache: PageCache

    @property
    def n_cached(self) -> int:
        """Chunks in the store when the first question comes."""
        return round(self.cached_share * self.n_chunks)

    @property
    def questions(self) -> int:
        """How many are asked: a second one where the first may have left something behind."""
        return 1 if self.n_cached == self.n_chunks else 2


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """What to time. Texts, and weights but the built-in ones, are random with ``seed``.

    layers: so many of the shape's; None for all. new_tokens: of an answer, the first included.
    repeats: rounds that count. memory: whether one more round measures it. folder: where the
    temporary store goes, which decides what disk is measured; None for the system's.

    Raises:
        UnknownOption: there is no such shape.
        InvalidOption: any other value that cannot be measured.
    """

    shape: str = "qwen2.5-0.5b"
    layers: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    n_chunks: tuple[int, ...] = (8,)
    chunk_tokens: tuple[int, ...] = (512,)
    text_tokens: tuple[int, ...] = (0,)
    cached_shares: tuple[float, ...] = (1.0,)
    page_caches: tuple[PageCache, ...] = ("warm",)
    new_tokens: int = 1
    repeats: int = 3
    memory: bool = True
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        shapes.check(self.shape, self.layers, self.dtype)
        check_counts("chunks", self.n_chunks, 1)
        check_counts("chunk_tokens", self.chunk_tokens, 1)
        check_counts("uncached", self.text_tokens, 0)
        check_counts("new_tokens", [self.new_tokens], 1)
        check_counts("repeats", [self.repeats], 1)
        if not self.cached_shares:
            raise InvalidOption("cached is empty; give one share or more, as in 1.0,0.5")
        for share in self.cached_shares:
            if not 0 <= share <= 1:
                raise InvalidOption(f"cached={share:g}; a share must be between 0 and 1")
        if not self.page_caches or set(self.page_caches) - {"warm", "cold"}:
            raise InvalidOption(
                f"page_cache={','.join(self.page_caches)!r}; allowed: {', '.join(PAGE_CACHES)}"
            )
        if "cold" in self.page_caches:
            require_cold()
        check_folder(self.folder)

    def cells(self, chunk_tokens: int) -> list[Cell]:
        """The cells of one chunk length, in an order in which few chunks are cached twice."""
        shares = sorted(set(self.cached_shares), reverse=True)
        grid = product(shares, self.n_chunks, self.text_tokens, self.page_caches)
        return [
            Cell(
                n_chunks=n, chunk_tokens=chunk_tokens, text_tokens=uncached,
                cached_share=share, page_cache=page_cache,
            )
            for share, n, uncached, page_cache in grid
        ]  # fmt: skip

    @property
    def window(self) -> int:
        """Tokens that the longest prompt and its answer may take, with some to spare."""
        chunks = max(self.n_chunks) * (max(self.chunk_tokens) + 8)
        return chunks + max(self.text_tokens) + self.new_tokens + _OVERHEAD

    def model(self) -> Model:
        """The model of this shape."""
        return shapes.build(
            self.shape, layers=self.layers, dtype=self.dtype, device=self.device, seed=self.seed,
            window=self.window,
        )  # fmt: skip


def page_caches(word: str) -> tuple[PageCache, ...]:
    """What ``warm``, ``cold`` or ``both`` stands for; InvalidOption for any other word."""
    if word not in PAGE_CACHES:
        raise InvalidOption(f"page_cache={word!r}; allowed: {', '.join(PAGE_CACHES)}")
    return PAGE_CACHES[word]


def check_folder(folder: Path | None) -> None:
    """Raise InvalidOption if no store can be made in ``folder``."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InvalidOption(f"folder {folder} is not there, or not writable; make it first")


def check_counts(name: str, values: Sequence[int], least: int) -> None:
    """Raise InvalidOption unless there are ``values`` and none is below ``least``."""
    if not values:
        raise InvalidOption(f"{name} is empty; give one whole number or more, as in 4,8")
    for value in values:
        if value < least:
            raise InvalidOption(f"{name}={value}; it must be at least {least}")
