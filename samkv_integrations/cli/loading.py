"""Models and engines, as the options of a command name them."""

from __future__ import annotations

from pathlib import Path

import torch

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import check_given_bits

BUILTIN = "builtin"


def use_threads_for(model: str) -> None:
    """Use one thread for the built-in model, so small that a second costs more than it gives."""
    if model == BUILTIN:
        torch.set_num_threads(1)


def engine_of(
    model: str, store: Path, device: str, dtype: str, store_bits: int | None,
    max_bytes: int | None = None, namespace: str = "", remote: str | None = None,
) -> Engine:  # fmt: skip
    """An engine whose chunk caches are in the folder ``store``, which is made if it is missing.

    max_bytes: what they may take from now on; None for what was said before.
    remote: where machines share them.
    """
    use_threads_for(model)
    check_given_bits(store_bits)  # before a folder is made
    return Engine.from_pretrained(
        model,
        ChunkStore(store, namespace=namespace, max_bytes=max_bytes, remote=remote),
        device=device,
        dtype=dtype,
        store_bits=store_bits,
    )
