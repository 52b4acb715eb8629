"""The doctor checks that a model is computed exactly, and advises on its settings.

It takes seconds on a small model. The checks of exactness come first: each computes the same
numbers in two ways, one of them transformers' own, and a failure is a defect. Then comes advice,
which never fails: which store_bits to use, and when full prefill is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.formats.quantise import (
    DEFAULT_STORE_BITS,
    STORE_BITS,
    rotate,
    unrotate,
)
from samkv_integrations.engine.costs import CostModel, is_whole
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidChunk, InvalidOption
from samkv_integrations.methods import METHODS
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.prompt.rag_template import rag_prompt

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Largest difference that rounding may cause, as a share of the largest number compared."""

NEW_TOKENS = 12
"""Length of the answer for the check of greedy decoding."""

CHUNKS = (
    "[Harbour]\nThe harbour of Ostmere was built in 1874. Its lighthouse is painted green.",
    "[Library]\nThe town library holds 5120 books; it opens at nine and closes at six.",
    "[Railway]\nTwo trains a day run to Ostmere.\nThe line was laid by Ida Brandt.",
)

QUESTION = "Who laid the railway line to Ostmere?"

_THEATRE = (
    "[Theatre]\nThe theatre seats 240. Its curtain, woven in 1902, shows the river with three "
    "boats; the middle one has a red sail."
)
SAMPLES = (
    (QUESTION, ("Ida Brandt",), CHUNKS),
    ("How many books does the library hold?", ("5120",), CHUNKS[1::-1]),
    (
        "When was the bakery opened?",
        ("1931",),
        (
            "[Bakery]\nThe bakery on Mill Lane was opened in 1931 by the Holm family. It sells rye "
            "bread and a plum cake, which is made on Fridays only.",
            _THEATRE,
        ),
    ),
    (
        "What colour is the sail of the middle boat?",
        ("red",),
        (
            "[Ferry]\nThe ferry takes twelve minutes, four cars and sixty people. In winter it "
            "waits for the ice to be broken.",
            _THEATRE,
            "[School]\nThe school has nine teachers. Its garden grows beans, and the bell is rung "
            "by hand.",
        ),
    ),
    (
        "Who rings the bell?",
        ("oldest pupil",),
        (
            "[School]\nThe school has nine teachers. Its garden grows beans, and the bell is rung "
            "by hand, by the oldest pupil.",
            "[Clock]\nThe clock of the town hall has been five minutes slow since the storm of "
            "1987; nobody minds.",
        ),
    ),
)
"""Questions, right answers and chunks, on which the effect of fewer bits is measured."""

NEGLIGIBLE_KL = 0.05
"""Mean KL divergence in nats that fewer bits may add to first tokens.

A tenth of what reuse without recomputation changes on real paragraphs (docs/results.md). By
Pinsker's inequality no probability then changes by more than sqrt(0.05 / 2) = 0.16 on average.
"""

CHUNK_TOKENS, QUESTION_TOKENS = 256, 32
"""Lengths of a chunk and of the question, in the prompts that times are estimated for."""

LONGEST_TOKENS = 2**16
"""Longest context that times are estimated for."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its outcome. A warning is no failure: answers are still exact."""

    name: str
    ok: bool
    detail: str
    is_warning: bool = False

    def to_row(self) -> dict[str, str | bool]:
        """The check as a row of ``samkv doctor --json``."""
        detail = f"warning: {self.detail}" if self.is_warning else self.detail
        return {"check": self.name, "ok": self.ok, "detail": detail}


def examine(
    model: Model, store: ChunkStore | None = None
) -> Generator[Check, None, tuple[int, CostModel]]:
    """Yields the checks of ``model`` one by one; returns the advised bits and the measured costs.

    store: where the measured costs are kept; nothing else is written to disk.

    Raises StoreError if the store cannot be written.
    """
    # 16 bits, so that the store rounds nothing
    engine = Engine(model, method="recompute", prefix="bos", store_bits=16)
    engine.cache_chunks(CHUNKS)
    with torch.inference_mode():
        for check in (_full_prefill, _prefix_reuse, _rotation, _greedy, _tokens):
            yield check(engine)
    advised = yield from bits_advice(model)
    measured = Engine(model, store, store_bits=advised)
    yield speed_advice(measured)
    return advised, measured.costs


# -- exactness --------------------------------------------------------------------------------


def _full_prefill(engine: Engine) -> Check:
    prompt = _prompt()
    ours, ids = _first_logits(engine, prompt, CHUNKS, "recompute")
    reused, _ = _first_logits(engine, prompt, CHUNKS, "reuse")
    plain = _plain_logits(engine.model, ids)[-1]
    contrast = f"; reusing every chunk as it is changes them by {_largest(reused - plain):.1e}"
    return _compare("full prefill", engine.model, "logits", ours, plain, contrast)


def _prefix_reuse(engine: Engine) -> Check:
    """A chunk right behind the prefix is exact: its cache gives the same logits as its text."""
    bos = engine.model.tokenizer.bos_token or ""  # not every tokenizer adds it to a text
    prompt = f"{bos}{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:"
    ours, ids = _first_logits(engine, prompt, CHUNKS[:1], "reuse")
    return _compare(
        "prefix reuse", engine.model, "logits", ours, _plain_logits(engine.model, ids)[-1]
    )


def _rotation(engine: Engine) -> Check:
    """Compares keys at a new position, rotated there by us and by the model, in every layer.

    Both come from the same hidden states, so only the position differs.
    """
    model = engine.model
    ids = torch.tensor([model.tokenize(CHUNKS[0], special=False)])
    here = torch.arange(ids.shape[1])
    there = here + (model.context_window - ids.shape[1]) // 2
    captured: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        captured.append(key[0].transpose(0, 1))  # (T, G, D)
        return model.attention(layer, query, key, value, scaling, None, True)

    rotations = model.rotation(here), model.rotation(there)
    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        after = model.layer(layer, hidden, *rotations[0].of(layer), attend)
        model.layer(layer, hidden, *rotations[1].of(layer), attend)
        hidden = after
    moved = []
    for layer, keys in enumerate(captured[0::2]):
        stored = unrotate(keys, *rotations[0].of(layer))
        moved.append(rotate(stored, *rotations[1].of(layer)))
    ours = torch.stack(moved)
    theirs = torch.stack(captured[1::2])
    # relative to each rotated pair: a few channels of a key are often far larger than the others
    pairs = torch.hypot(*theirs.float().chunk(2, dim=-1)).clamp(min=1e-6).repeat(1, 1, 1, 2)
    how_far = f"; keys of all layers moved by {int(there[0])} positions"
    return _compare("key rotation", model, "keys", ours / pairs, theirs / pairs, how_far)


def _greedy(engine: Engine) -> Check:
    model, name = engine.model, "greedy decoding"
    with engine.resolve(_prompt(), CHUNKS) as resolved:
        ids = resolved.token_ids
    prompt = torch.tensor([ids], device=model.device)
    output = model.hf.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    expected = [token for token in output[0, len(ids) :].tolist() if token not in model.eos_ids]
    answer = engine.generate(_prompt(), CHUNKS, max_new_tokens=NEW_TOKENS).text
    if answer == model.detokenize(expected):
        return Check(name=name, ok=True, detail=f"the same {len(expected)} tokens as generate()")
    n_same = max(
        n for n in range(len(expected) + 1) if answer.startswith(model.detokenize(expected[:n]))
    )
    logits = _plain_logits(model, torch.tensor(ids + expected[:n_same]))[-1]
    best, second = logits.topk(2).values.tolist()
    limit = TOLERANCE[model.dtype_name] * _largest(logits)
    where = f"differs from generate() after {n_same} tokens, where the best two candidates are"
    return Check(
        name=name,
        ok=best - second <= limit,
        is_warning=best - second <= limit,
        detail=f"{where} {best - second:.1e} apart (a tie up to {limit:.1e})",
    )


def _tokens(engine: Engine) -> Check:
    """Compares the token ids of prompts with those of transformers."""
    model, prompt, kinds = engine.model, _prompt(), "plain prompt"
    with engine.resolve(prompt, CHUNKS) as resolved:
        same = resolved.token_ids == model.tokenizer(prompt).input_ids
        n_context, n_tokens = resolved.n_context, len(resolved.token_ids)
    if model.has_chat_template:
        messages, kinds = [{"role": "user", "content": prompt}], "plain prompt and chat"
        theirs = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        with engine.resolve(messages, CHUNKS) as resolved:
            same &= resolved.token_ids == theirs
    detail = (
        f"{kinds}: those of the tokenizer; caches have {n_context} of {n_tokens}"
        if same
        else f"{kinds}: not those of the tokenizer"
    )
    return Check(name="tokens", ok=same, detail=detail)


def _prompt() -> str:
    prompt = rag_prompt(QUESTION, CHUNKS)
    assert isinstance(prompt, str)
    return prompt


def _first_logits(
    engine: Engine, prompt: str, chunks: Sequence[str], method: str
) -> tuple[Tensor, Tensor]:
    """Logits (vocabulary,) of the first token by ``method``, and the prompt's ids (T,)."""
    with engine.resolve(prompt, chunks) as resolved:
        ids = resolved.token_ids
    logits = engine.logits(prompt, chunks, method=method, eviction="none")[0]
    return logits, torch.tensor(ids)


def _plain_logits(model: Model, ids: Tensor) -> Tensor:
    """(T, vocabulary) by the forward pass of transformers."""
    logits: Tensor = model.hf(ids[None].to(model.device), use_cache=False).logits[0]
    return logits


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _compare(
    name: str, model: Model, what: str, ours: Tensor, theirs: Tensor, remark: str = ""
) -> Check:
    limit = TOLERANCE[model.dtype_name] * _largest(theirs)
    difference = _largest(ours.float() - theirs.float())
    return Check(
        name=name,
        ok=difference <= limit,  # false for a NaN too
        detail=f"{what} differ by {difference:.1e} at most, allowed {limit:.1e}{remark}",
    )


# -- advice -----------------------------------------------------------------------------------


def bits_advice(model: Model) -> Generator[Check, None, int]:
    """Yields the effect of each number of bits below 16, then the advice; returns the bits."""
    most = max(STORE_BITS)
    advised, exact = most, _sample_logits(model, most)
    for bits in sorted(STORE_BITS, reverse=True)[1:]:
        name = f"store_bits={bits}"
        try:
            found = _sample_logits(model, bits)
        except (InvalidChunk, InvalidOption) as error:
            yield Check(name=name, ok=True, is_warning=True, detail=str(error))
            continue
        pairs = list(zip(exact, found, strict=True))
        changes = [_kl(full, other) for full, other in pairs]
        n_same = sum(int(full.argmax()) == int(other.argmax()) for full, other in pairs)
        mean = fmean(changes)
        is_negligible = mean <= NEGLIGIBLE_KL  # false for a NaN too
        advised = bits if is_negligible else advised
        detail = (
            f"first tokens differ from those of {most} bits by a KL divergence of {mean:.1e} on "
            f"average (negligible up to {NEGLIGIBLE_KL}), {max(changes):.1e} at most; the "
            f"likeliest one is the same in {n_same} of {len(pairs)} prompts"
        )
        yield Check(name=name, ok=True, is_warning=not is_negligible, detail=detail)
    is_default = advised == DEFAULT_STORE_BITS
    detail = (
        f"take {advised}, the default: what it changes is negligible"
        if is_default
        else f"take store_bits={advised} (--store-bits {advised}): with the default, "
        f"{DEFAULT_STORE_BITS}, answers may change"
    )
    yield Check(name="store_bits", ok=True, is_warning=not is_default, detail=detail)
    return advised


def _sample_logits(model: Model, bits: int) -> list[Tensor]:
    """(vocabulary,) of the first token of each sample, with chunks stored in ``bits``.

    Each question is asked with every rotation of its chunks, as single prompts differ much.
    """
    engine = Engine(model, method="reuse", store_bits=bits)
    found = []
    for question, _, chunks in SAMPLES:
        engine.cache_chunks(chunks)
        for first in range(len(chunks)):
            order = (*chunks[first:], *chunks[:first])
            found.append(engine.logits(rag_prompt(question, order), order, eviction="none")[0])
    return found


def _kl(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats, of logits (vocabulary,) each."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    return float(kl_div(mine, theirs, reduction="sum", log_target=True).clamp_min(0))


def speed_advice(engine: Engine) -> Check:
    """Measures costs, and tells up to which context full prefill is faster than reuse."""
    model, costs = engine.model, engine.calibrate()
    longest = min(model.context_window - QUESTION_TOKENS, LONGEST_TOKENS)
    # the smallest context with which auto uses caches
    smallest = 1 + bisect_left(
        range(1, longest + 1),
        True,
        key=lambda n: not is_whole(METHODS["auto"], costs, _layout(n), _layout(n)),
    )
    shown = _layout(min(2048, longest) if smallest > longest else smallest)
    n_context, n_tokens = shown.n_context, shown.n_tokens
    full = costs.full_prefill_s(n_tokens) * model.n_layers
    partial = costs.blended_s(METHODS["auto"], shown) * model.n_layers
    if smallest > longest:
        verdict = f"full prefill is faster up to contexts of {longest} tokens, which auto then does"
    else:
        verdict = f"auto does full prefill, which is faster, below contexts of {smallest} tokens"
    folder = f"in {engine.store.path}" if isinstance(engine.store, ChunkStore) else ""
    return Check(
        name="speed",
        ok=True,
        detail=f"{verdict}; with {n_context} tokens full prefill is estimated at {full:.2g} s, "
        f"{METHODS['auto'].else_way} at {partial:.2g} s; "
        + (f"kept {folder}" if folder else "measured, but not kept: give --dir for that"),
    )


def _layout(n_context: int) -> Layout:
    """A layout of chunks of `CHUNK_TOKENS`, the last one maybe shorter, and a question."""
    lengths = [CHUNK_TOKENS] * (n_context // CHUNK_TOKENS)
    lengths += [n_context % CHUNK_TOKENS] if n_context % CHUNK_TOKENS else []
    ends = list(accumulate(lengths))
    chunks = [
        ChunkPart.whole(BlockScheme().of(n), end - n) for n, end in zip(lengths, ends, strict=True)
    ]
    return Layout.of([0] * (ends[-1] + QUESTION_TOKENS), chunks, ())
