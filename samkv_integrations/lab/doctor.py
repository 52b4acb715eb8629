"""The doctor checks that a model is computed exactly, and advises on its settings.

It takes seconds on a small model. The checks of exactness come first. Each compares numbers that
are computed in two ways, one of them transformers' own; a failure is a defect. The advice follows,
which never fails: it tells when full prefill is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.lab.runtime_doctor import (
    CHUNKS,
    PROMPT,
    QUESTION,
    TOLERANCE,
    Check,
    speed_advice,
)
from samkv_integrations.runtimes.transformers.entries.quantise import rotate, unrotate
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.indexed import IndexedStore

DECODED_TOKENS = 12
"""Tokens after the first one whose logits are compared."""


def examine(model: Model, store: IndexedStore | None = None) -> Iterator[Check]:
    """Yields the checks of ``model`` one by one.

    store: keeps the measured costs; nothing else is written to disk.

    Raises StoreError if the store cannot be written.
    """
    # 16 bits, so that the store rounds nothing
    engine = Engine(model, method="recompute", prefix="bos", store_bits=16)
    engine.cache_chunks(CHUNKS)
    with torch.inference_mode():
        for check in (_full_prefill, _prefix_reuse, _rotation, _tokens):
            yield check(engine)
    yield speed_advice(Engine(model, store))


def _model(engine: Engine) -> Model:
    assert isinstance(engine.model, Model)  # `examine` was given one
    return engine.model


# -- exactness --------------------------------------------------------------------------------


def _full_prefill(engine: Engine) -> Check:
    """Compares the logits of a prompt's first token and of the tokens decoded after it."""
    follow = engine.model.tokenize(CHUNKS[1], special=False)[:DECODED_TOKENS]
    ours, plain = _logits(engine, PROMPT, CHUNKS, "recompute", follow)
    reused, _ = _logits(engine, PROMPT, CHUNKS, "reuse", follow)
    contrast = f"; reusing every chunk as it is changes them by {_largest(reused - plain):.1e}"
    return _compare("full prefill and decoding", _model(engine), "logits", ours, plain, contrast)


def _prefix_reuse(engine: Engine) -> Check:
    """A chunk right behind the prefix is exact: its cache gives the same logits as its text."""
    bos = _model(engine).tokenizer.bos_token or ""  # not all tokenizers add it to a text
    prompt = f"{bos}{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:"
    ours, plain = _logits(engine, prompt, CHUNKS[:1], "reuse")
    return _compare("prefix reuse", _model(engine), "logits", ours, plain)


def _rotation(engine: Engine) -> Check:
    """Compares the keys of every layer at new positions, rotated by us and by the model."""
    model = _model(engine)
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


def _tokens(engine: Engine) -> Check:
    """Compares the token ids of prompts with those of transformers."""
    model, kinds = _model(engine), "plain prompt"
    with engine.resolve(PROMPT, CHUNKS) as resolved:
        same = resolved.token_ids == model.tokenizer(PROMPT).input_ids
        n_context, n_tokens = resolved.n_context, len(resolved.token_ids)
    if model.has_chat_template:
        messages, kinds = [{"role": "user", "content": PROMPT}], "plain prompt and chat"
        theirs = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        with engine.resolve(messages, CHUNKS) as resolved:
            same &= resolved.token_ids == theirs
    detail = (
        f"{kinds}: as from the tokenizer; caches have {n_context} of {n_tokens}"
        if same
        else f"{kinds}: unlike those of the tokenizer"
    )
    return Check(name="tokens", ok=same, detail=detail)


def _logits(
    engine: Engine, prompt: str, chunks: Sequence[str], method: str, follow: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(1 + n, vocabulary) logits before and after n tokens, by ``method`` and by transformers."""
    model = _model(engine)
    with engine.resolve(prompt, chunks) as resolved:
        ids = torch.tensor([[*resolved.token_ids, *follow]], device=model.device)
    ours = engine.logits(prompt, chunks, follow=follow, method=method, eviction="none")
    plain = model.hf(ids, use_cache=False).logits[0, -1 - len(follow) :]
    return ours, plain.float().cpu()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _compare(
    name: str, model: Model, what: str, ours: Tensor, theirs: Tensor, remark: str = ""
) -> Check:
    limit = TOLERANCE[model.dtype_name] * _largest(theirs)
    difference = _largest(ours.float() - theirs.float())
    return Check(
        name=name,
        ok=difference <= limit,  # also false for NaN
        detail=f"{what} differ by {difference:.1e} at most, allowed {limit:.1e}{remark}",
    )
