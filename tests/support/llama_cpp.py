"""Models that tests run with llama.cpp."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from samkv_integrations.runtimes.llama_cpp.library.binding import installed
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel

with_llama_cpp = pytest.mark.skipif(installed() is None, reason="llama.cpp is not installed")


def smollm2(**options: Any) -> LlamaCppModel:
    """A real model of 135 million parameters, loaded again each time."""
    from samkv_integrations.runtimes.llama_cpp.loading import load_model

    return load_model("smollm2", **{"n_threads": 1, "n_ctx": 2048, **options})


@cache
def shared_smollm2() -> LlamaCppModel:
    """The same one for all tests that keep nothing in it."""
    return smollm2()


@cache
def _folder() -> Path:
    return Path(mkdtemp())


def of_transformers(hf: Any, tokenizer: Any, name: str) -> Any:  # noqa: ANN401
    """A Llama or Qwen of transformers on llama.cpp, which splits texts into words as GPT-2 does."""
    from samkv_integrations.runtimes.llama_cpp.loading import load_model
    from tests.support.gguf_files import NEVER, without_bias, write_gguf

    path = _folder() / f"{name}-{len(list(_folder().iterdir()))}.gguf"
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    write_gguf(path, without_bias(hf), tokenizer=tokenizer, merges=[*map(" ".join, pairs)] or NEVER)
    model = load_model(str(path), n_threads=1)
    model.name = name
    return model


def tiny(family: str, *, extra: dict[str, Any] | None = None, **options: Any) -> LlamaCppModel:
    """A tiny model of random float32 weights. extra: more metadata of its file."""
    from samkv_integrations.runtimes.llama_cpp.loading import load_model
    from tests.support.gguf_files import model_for_gguf, write_gguf

    path = _folder() / f"{family}-{len(list(_folder().iterdir()))}.gguf"
    write_gguf(path, model_for_gguf(family), extra=extra)
    return load_model(str(path), **{"n_threads": 1, "n_ctx": 1024, **options})
