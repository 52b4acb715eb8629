"""Checks of exactness: does the engine compute what the model itself computes?

Every check has two ways to the same figures, one of them transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samkv_integrations.cache.quantise import rotate, unrotate
from samkv_integrations.engine.check import Check
from samkv_integrations.engine.engine import Engine
from samkv_integrations.model.attention import attention
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.template import rag_prompt

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference that rounding may make, as a share of the largest figure compared."""

NEW_TOKENS = 12
"""Tokens of the answer whose greedy decoding is compared."""

CHUNKS = (
    "[Harbour]\nThe harbour of Ostmere was built in 1874. Its lighthouse is painted green.",
    "[Library]\nThe town library holds 5120 books; it opens at nine and closes at six.",
    "[Railway]\nTwo trains a day run to Ostmere.\nThe line was laid by Ida Brandt.",
)

QUESTION = "Who laid the railway line to Ostmere?"


def _full_prefill(engine: Engine) -> Check:
    prompt = _prompt()
    ours, ids = _first_logits(engine, prompt, CHUNKS, "recompute")
    reused, _ = _first_logits(engine, prompt, CHUNKS, "reuse")
    plain = _plain_logits(engine.model, ids)[-1]
    contrast = f"; reusing every chunk as it is changes them by {_largest(reused - plain):.1e}"
    return _compare("full prefill", engine.model, "logits", ours, plain, contrast)


def _prefix_reuse(engine: Engine) -> Check:
    """A chunk right after the prefix is exact: its cache must give what its text gives."""
    bos = engine.model.tokenizer.bos_token or ""  # which not every tokenizer adds to a text
    prompt = f"{bos}{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:"
    ours, ids = _first_logits(engine, prompt, CHUNKS[:1], "reuse")
    return _compare(
        "prefix reuse", engine.model, "logits", ours, _plain_logits(engine.model, ids)[-1]
    )


def _rotation(engine: Engine) -> Check:
    """Compares keys of every layer at a new position: rotated there by us, and by the model.

    Both come from the same hidden states, so nothing but the position differs.
    """
    model = engine.model
    ids = torch.tensor([model.tokenize(CHUNKS[0], special=False)])
    here = torch.arange(ids.shape[1])
    there = here + (model.context_window - ids.shape[1]) // 2
    captured: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        captured.append(key[0].transpose(0, 1))  # (T, G, D)
        return attention(query, key, value, scaling, None, True)

    rotations = model.cos_sin(here), model.cos_sin(there)
    hidden = model.embed(ids)
    for layer in range(model.n_layers):
        after = model.layer(layer, hidden, *rotations[0], attend)
        model.layer(layer, hidden, *rotations[1], attend)
        hidden = after
    stored = [unrotate(keys, *rotations[0]) for keys in captured[0::2]]
    ours = torch.stack([rotate(keys, *rotations[1]) for keys in stored])
    theirs = torch.stack(captured[1::2])
    # relative to each rotated pair, because a few channels of a key are often far larger than all
    # others and would hide them
    pairs = torch.hypot(*theirs.float().chunk(2, dim=-1)).clamp(min=1e-6).repeat(1, 1, 1, 2)
    moved = f"; keys of all layers moved by {int(there[0])} positions"
    return _compare("key rotation", model, "keys", ours / pairs, theirs / pairs, moved)


def _greedy(engine: Engine) -> Check:
    model, name = engine.model, "greedy decoding"
    with engine.resolve(_prompt(), CHUNKS) as resolved:
        ids = resolved.token_ids
    prompt = torch.tensor([ids], device=model.device)
    output = model.hf.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
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
    """Whether prompts are read in the tokens that transformers makes of them."""
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


EXACTNESS_CHECKS: tuple[Callable[[Engine], Check], ...] = (
    _full_prefill,
    _prefix_reuse,
    _rotation,
    _greedy,
    _tokens,
)


def _prompt() -> str:
    prompt = rag_prompt(QUESTION, CHUNKS)
    assert isinstance(prompt, str)
    return prompt


def _first_logits(
    engine: Engine, prompt: str, chunks: Sequence[str], method: str
) -> tuple[Tensor, Tensor]:
    """Logits (vocabulary,) of the answer's first token by ``method``, and the prompt's ids (T,)."""
    with engine.resolve(prompt, chunks) as resolved:
        ids = resolved.token_ids
    logits = engine.logits(prompt, chunks, method=method, eviction="none")[0]
    return logits, torch.tensor(ids)


def _plain_logits(model: Model, ids: Tensor) -> Tensor:
    """(T, vocabulary) by the plain forward of transformers."""
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
