"""The correctness gate: does this engine compute what the model itself computes?

Every check of exactness has two ways to the same figures, one of them transformers' own. It runs on
any supported model, in seconds on a small one. What follows is advice and never fails: what storing
chunks in fewer bits changes, and when full prefill is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, STORE_BITS
from samkv_integrations.cache.rope import rotate, unrotate
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.full_prefill import is_whole, two_passes_s
from samkv_integrations.errors import InvalidChunk, InvalidOption
from samkv_integrations.methods import METHODS
from samkv_integrations.model.attention import attention
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout, Segment
from samkv_integrations.prompt.template import rag_prompt

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference that rounding may make, as a share of the largest figure compared."""


NEW_TOKENS = 12


CHUNKS = (
    "[Harbour]\nThe harbour of Ostmere was built in 1874. Its lighthouse is painted green.",
    "[Library]\nThe town library holds 5120 books; it opens at nine and closes at six.",
    "[Railway]\nTwo trains a day run to Ostmere.\nThe line was laid by Ida Brandt.",
)


QUESTION = "Who laid the railway line to Ostmere?"


SAMPLES = (
    (QUESTION, CHUNKS),
    ("How many books does the library hold?", CHUNKS[1::-1]),
    (
        "When was the bakery opened?",
        (
            "[Bakery]\nThe bakery on Mill Lane was opened in 1931 by the Holm family. It sells rye "
            "bread and a plum cake, which is made on Fridays only.",
            "[Theatre]\nThe theatre seats 240. Its curtain, woven in 1902, shows the river with "
            "three boats; the middle one has a red sail.",
        ),
    ),
    (
        "What colour is the sail of the middle boat?",
        (
            "[Ferry]\nThe ferry takes twelve minutes, four cars and sixty people. In winter it "
            "waits for the ice to be broken.",
            "[Theatre]\nThe theatre seats 240. Its curtain, woven in 1902, shows the river with "
            "three boats; the middle one has a red sail.",
            "[School]\nThe school has nine teachers. Its garden grows beans, and the bell is rung "
            "by hand.",
        ),
    ),
    (
        "Who rings the bell?",
        (
            "[School]\nThe school has nine teachers. Its garden grows beans, and the bell is rung "
            "by hand, by the oldest pupil.",
            "[Clock]\nThe clock of the town hall has been five minutes slow since the storm of "
            "1987; nobody minds.",
        ),
    ),
)
"""Questions, each with its chunks, for what fewer bits change."""


NEGLIGIBLE_KL = 0.05
"""Nats of KL divergence that fewer bits may add to first tokens, on average.

A tenth of what reusing chunks as they are changes on real paragraphs (docs/results.md). The
probability of any token then moves by sqrt(0.05 / 2) = 0.16 at most, on average (Pinsker).
"""


CHUNK_TOKENS, QUESTION_TOKENS = 256, 32
"""The prompts for which `auto` is asked when full prefill is faster."""


LONGEST_TOKENS = 2**16


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and how it went. A warning is not a failure: what runs is still exact."""

    name: str
    ok: bool
    detail: str
    is_warning: bool = False

    def to_row(self) -> dict[str, str | bool]:
        """The row of the JSON contract."""
        detail = f"warning: {self.detail}" if self.is_warning else self.detail
        return {"check": self.name, "ok": self.ok, "detail": detail}


def examine(model: Model, store: ChunkStore | None = None) -> Iterator[Check]:
    """All checks of ``model``, each as soon as it is done.

    store: where what passes cost is kept; nothing else is written to disk.

    Raises StoreError if it cannot be written.
    """
    # What is exact must not be rounded by the store.
    engine = Engine(model, method="recompute", store_bits=16)
    engine.cache_chunks(CHUNKS)
    with torch.inference_mode():
        for check in _CHECKS:
            yield check(engine)
    negligible = []
    for bits, found in _fewer_bits(model):
        negligible += [] if found.is_warning else [bits]
        yield found
    advised = min(negligible, default=max(STORE_BITS))
    yield _advice(advised)
    yield _speed(Engine(model, store, store_bits=advised))


def _full_prefill(engine: Engine) -> Check:
    prompt = _prompt()
    ours, ids = _first_logits(engine, prompt, CHUNKS, "recompute")
    reused, _ = _first_logits(engine, prompt, CHUNKS, "reuse")
    plain = _plain_logits(engine.model, ids)[-1]
    contrast = f"; reusing every chunk as it is changes them by {_largest(reused - plain):.1e}"
    return _compare("full prefill", engine.model, "logits", ours, plain, contrast)


def _prefix_reuse(engine: Engine) -> Check:
    """A chunk right after the prefix is exact, so that its cache may stand for its text."""
    prompt = f"{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:"
    ours, ids = _first_logits(engine, prompt, CHUNKS[:1], "reuse")
    return _compare(
        "prefix reuse", engine.model, "logits", ours, _plain_logits(engine.model, ids)[-1]
    )


def _rotation(engine: Engine) -> Check:
    """Keys of every layer at two places: rotated there by us, and by the model.

    Both come from the same rows before attention, so nothing but the position differs.
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
        ids = [token for segment in resolved.segments for token in segment.token_ids]
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


def _token_boundaries(engine: Engine) -> Check:
    model, prompt = engine.model, _prompt()
    with engine.resolve(prompt, CHUNKS) as resolved:
        pieces = [token for segment in resolved.segments for token in segment.token_ids]
    bos = [] if model.bos_id is None else [model.bos_id]
    whole = bos + model.tokenize(prompt, special=True)
    if pieces == whole:
        detail = f"{len(whole)} tokens, in pieces and as a whole"
        return Check(name="token boundaries", ok=True, detail=detail)
    at = next(
        (i for i, pair in enumerate(zip(pieces, whole, strict=False)) if pair[0] != pair[1]),
        min(len(pieces), len(whole)),
    )
    near = model.detokenize(pieces[max(0, at - 3) : at + 3])
    return Check(
        name="token boundaries",
        ok=True,
        is_warning=True,
        detail=f"{len(pieces)} tokens in pieces, {len(whole)} as a whole; the first difference is "
        f"near {near!r}. The pieces are what runs, by every method",
    )


def _chat_template(engine: Engine) -> Check:
    model, name = engine.model, "chat template"
    if not model.has_chat_template:
        return Check(name=name, ok=True, detail="the tokenizer has none: plain prompts only")
    messages = [{"role": "user", "content": _prompt()}]
    rendered = model.render_chat(messages)
    with engine.resolve(rendered, ()) as resolved:
        ours = [token for segment in resolved.segments for token in segment.token_ids]
    with engine.resolve(rendered, CHUNKS) as resolved:
        split = [token for segment in resolved.segments for token in segment.token_ids]
    theirs = model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    bos, added = model.bos_id, ""
    if bos is not None and theirs[0] != bos:
        theirs, added = [bos, *theirs], "; the template leaves BOS out, the engine adds it"
    problems = []
    if ours != theirs:
        problems.append(f"{len(ours)} tokens here, {len(theirs)} by the tokenizer's own template")
    for kind, ids in (("whole", ours), ("split at its chunks", split)):
        if bos is not None and ids[:2] == [bos, bos]:
            problems.append(f"the prompt ({kind}) begins with BOS twice")
        if bos is not None and ids[0] != bos:
            problems.append(f"the prompt ({kind}) does not begin with BOS")
    same = f"{len(ours)} tokens, as by the tokenizer's own template"
    begins = "" if bos is None else ", one BOS"
    return Check(name=name, ok=not problems, detail="; ".join(problems) or f"{same}{begins}{added}")


def _fewer_bits(model: Model) -> Iterator[tuple[int, Check]]:
    """What each number of bits below the most changes. A warning if that is not negligible."""
    most = max(STORE_BITS)
    exact = _sample_logits(model, most)
    for bits in sorted(STORE_BITS, reverse=True)[1:]:
        name = f"store_bits={bits}"
        try:
            found = _sample_logits(model, bits)
        except (InvalidChunk, InvalidOption) as error:
            yield bits, Check(name=name, ok=True, is_warning=True, detail=str(error))
            continue
        pairs = list(zip(exact, found, strict=True))
        changes = [_kl(full, other) for full, other in pairs]
        n_same = sum(int(full.argmax()) == int(other.argmax()) for full, other in pairs)
        mean = fmean(changes)
        detail = (
            f"first tokens differ from those of {most} bits by a KL divergence of {mean:.1e} on "
            f"average (negligible up to {NEGLIGIBLE_KL}), {max(changes):.1e} at most; the "
            f"likeliest one is the same in {n_same} of {len(pairs)} prompts"
        )
        # "not <=" rather than ">", for a NaN
        yield bits, Check(name=name, ok=True, is_warning=not mean <= NEGLIGIBLE_KL, detail=detail)


def _sample_logits(model: Model, bits: int) -> list[Tensor]:
    """(vocabulary,) of the first token of each sample, by reusing chunks stored in ``bits``.

    Each question over its chunks in every turned order: single prompts differ by far.
    """
    engine = Engine(model, method="reuse", store_bits=bits)
    found = []
    for question, chunks in SAMPLES:
        engine.cache_chunks(chunks)
        for first in range(len(chunks)):
            order = (*chunks[first:], *chunks[:first])
            found.append(engine.logits(rag_prompt(question, order), order, eviction="none")[0])
    return found


def _kl(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats, of logits (vocabulary,) each."""
    theirs, mine = (logits.double().log_softmax(-1) for logits in (full, other))
    return float(kl_div(mine, theirs, reduction="sum", log_target=True).clamp_min(0))


def _advice(advised: int) -> Check:
    """Which store_bits to take. A warning if it is not the default."""
    name = "store_bits"
    if advised == DEFAULT_STORE_BITS:
        detail = f"take {advised}, the default: what it changes is negligible"
        return Check(name=name, ok=True, detail=detail)
    detail = (
        f"take store_bits={advised} (--store-bits {advised}): with the default, "
        f"{DEFAULT_STORE_BITS}, answers may change"
    )
    return Check(name=name, ok=True, is_warning=True, detail=detail)


def _speed(engine: Engine) -> Check:
    """When full prefill is faster than two passes, by what passes cost here."""
    model, costs = engine.model, engine.calibrate()
    longest = min(model.context_window - QUESTION_TOKENS, LONGEST_TOKENS)
    smallest = _smallest_context(costs, longest)
    shown = _layout(min(2048, longest) if smallest is None else smallest)
    n_context, n_tokens = shown.n_context, shown.n_tokens
    full = costs.full_prefill_s(n_tokens) * model.n_layers
    partial = two_passes_s(METHODS["auto"], costs, shown) * model.n_layers
    if smallest is None:
        verdict = f"full prefill is faster up to contexts of {longest} tokens, which auto then does"
    else:
        verdict = f"auto does full prefill, which is faster, below contexts of {smallest} tokens"
    folder = f"in {engine.store.path}" if isinstance(engine.store, ChunkStore) else ""
    return Check(
        name="speed",
        ok=True,
        detail=f"{verdict}; with {n_context} tokens full prefill is estimated at {full:.2g} s, "
        f"samkv-guided at {partial:.2g} s; "
        + (f"kept {folder}" if folder else "measured, but not kept: give --dir for that"),
    )


def _smallest_context(costs: CostModel, longest: int) -> int | None:
    """Fewest context tokens for which ``auto`` makes two passes; None up to ``longest``."""
    method, low, high = METHODS["auto"], 0, longest + 1
    while high - low > 1:  # whole at low, two passes at high
        middle = (low + high) // 2
        low, high = (middle, high) if is_whole(method, costs, _layout(middle)) else (low, middle)
    return None if high > longest else high


def _layout(n_context: int) -> Layout:
    """Chunks of `CHUNK_TOKENS` (the last one may be shorter), and a question."""
    lengths = [CHUNK_TOKENS] * (n_context // CHUNK_TOKENS)
    lengths += [n_context % CHUNK_TOKENS] if n_context % CHUNK_TOKENS else []
    chunks = [Segment(token_ids=(0,) * n, blocks=BlockScheme().of(n)) for n in lengths]
    return Layout.of([*chunks, Segment(token_ids=(0,) * QUESTION_TOKENS)], ())


_CHECKS: tuple[Callable[[Engine], Check], ...] = (
    _full_prefill,
    _prefix_reuse,
    _rotation,
    _greedy,
    _token_boundaries,
    _chat_template,
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
        ids = [token for segment in resolved.segments for token in segment.token_ids]
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
