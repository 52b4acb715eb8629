"""What the doctor says of a model on any runtime: whether chunks can be cached, and what suits it.

A failure is a defect. Advice never fails: it tells when full prefill is faster.
`samkv_integrations.lab.doctor` has the checks of models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.costs import is_whole
from samkv_integrations.option import PrefixPolicy
from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.store.chunk import BlockScheme
from samkv_integrations.store.indexed import IndexedStore

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Largest difference that rounding may cause, as a share of the largest number compared."""

MOST_ROUNDED = 0.1
"""The same for a model of quantised weights.

llama.cpp rounds activations to 8 bits, so that logits depend on which tokens are computed together:
by up to .04 of the largest (Qwen2.5-Coder 0.5 B and 1.5 B, Q4_K_M).
"""

CHUNKS = (
    "[Harbour]\nThe harbour of Ostmere was built in 1874. Its lighthouse is painted green.",
    "[Library]\nThe town library holds 5120 books; it opens at nine and closes at six.",
    "[Railway]\nTwo trains a day run to Ostmere.\nThe line was laid by Ida Brandt.",
)

QUESTION = "Who laid the railway line to Ostmere?"

PROMPT = "\n\n".join((*CHUNKS, f"Question: {QUESTION}\nAnswer:"))

CHUNK_TOKENS, QUESTION_TOKENS = 256, 32
"""Tokens of a chunk and of the question, in the prompts for which times are estimated."""

LONGEST_TOKENS = 2**16
"""Longest context for which times are estimated, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its outcome."""

    name: str
    ok: bool
    detail: str

    def to_row(self) -> dict[str, str | bool]:
        """The check as a row of ``samkv doctor --json``."""
        return {"check": self.name, "ok": self.ok, "detail": self.detail}


def examine(model: Runtime, store: IndexedStore | None = None) -> Iterator[Check]:
    """Yields the checks of a model on any runtime one by one.

    store: keeps the measured costs; nothing else is written to disk.

    Raises StoreError if the store cannot be written.
    """
    refusal = model.refuses_chunks
    yield Check(name="chunks", ok=True, detail=refusal or "their entries can be cached")
    if refusal is None:
        yield _exact_chunk(model)
        yield _blend(model)
        yield speed_advice(Engine(model, store))


def _exact_chunk(model: Runtime) -> Check:
    """A chunk at the beginning is exact: its cache gives the same logits as its text."""
    begins = model.tokenize(QUESTION, special=True)[0] == model.bos_id
    prefix: PrefixPolicy = "bos" if begins else "none"
    prompt = f"{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:"
    reused, full = _logits(model, prefix, prompt, CHUNKS[:1], "reuse")
    limit = MOST_ROUNDED * _largest(full)
    difference = _largest(reused - full)
    return Check(
        name="prefix reuse",
        ok=difference <= limit,  # also false for NaN
        detail=f"logits differ by {difference:.1e} at most, allowed {limit:.1e}",
    )


def _blend(model: Runtime) -> Check:
    """How far an answer over caches is from full prefill; the report of a method, no defect."""
    blended, full = _logits(model, "auto", PROMPT, CHUNKS, "samkv-guided")
    same = "the same first token" if blended.argmax() == full.argmax() else "another first token"
    return Check(
        name="blend",
        ok=bool(np.isfinite(blended).all()),
        detail=f"three chunks of caches change logits by {_largest(blended - full):.1e} of "
        f"{_largest(full):.1e}: {same} as full prefill",
    )


def _logits(
    model: Runtime, prefix: PrefixPolicy, prompt: str, chunks: Sequence[str], method: str
) -> tuple[Any, Any]:
    """(vocabulary,) float logits of the first token, by ``method`` and by full prefill."""
    # 16 bits, so that the store rounds nothing
    engine = Engine(model, prefix=prefix, store_bits=16, prefix_bytes=0)
    engine.cache_chunks(chunks)
    ours, full = (
        np.asarray(engine.logits(prompt, chunks, method=each))[0] for each in (method, "recompute")
    )
    return ours, full


def _largest(numbers: Any) -> float:  # noqa: ANN401
    return float(np.abs(numbers).max())


# -- advice -----------------------------------------------------------------------------------


def speed_advice(engine: Engine) -> Check:
    """Measures costs, and tells from which context `auto` uses caches, and how."""
    costs, chunk = engine.calibrate(), BlockScheme().of(CHUNK_TOKENS)
    lengths = range(CHUNK_TOKENS, min(engine.model.context_window, LONGEST_TOKENS), CHUNK_TOKENS)
    method = METHODS["auto"].for_model(engine.model.n_parameters)
    verdict = "auto does full prefill, which is faster at any length"
    for n_tokens in lengths:
        chunks = [ChunkPart.whole(chunk, at) for at in range(0, n_tokens, CHUNK_TOKENS)]
        layout = Layout([0] * (n_tokens + QUESTION_TOKENS), chunks, ())
        if not is_whole(method, costs, layout):
            options = (f"{name}={value}" for name, value in vars(method.recompute).items())
            verdict = (
                f"auto uses caches in contexts of {n_tokens} tokens or more, with "
                f"{', '.join(options)} as suits {engine.model.n_parameters / 1e9:.2g} billion "
                "parameters"
            )
            break
    kept = "not kept (give --dir to keep them)"
    if engine.store.path is not None:
        kept = f"kept in {engine.store.path}"
    return Check(name="speed", ok=True, detail=f"{verdict}; measured and {kept}")
