"""Advice about a model, which never fails.

Which store_bits to take, when full prefill is faster, and how often each method gives its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from functools import partial
from itertools import accumulate
from statistics import fmean

from torch import Tensor
from torch.nn.functional import kl_div

from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, STORE_BITS
from samkv_integrations.engine.check import Check
from samkv_integrations.engine.costs import CostModel
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.exactness import CHUNKS, QUESTION
from samkv_integrations.engine.full_prefill import is_whole, two_passes_s
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import InvalidChunk, InvalidOption, PromptTooLong
from samkv_integrations.methods import METHODS
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import ChunkPart, Layout
from samkv_integrations.prompt.template import rag_prompt

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
"""Questions, each with its chunks, on which the effect of fewer bits is measured."""

FURTHER_QUESTIONS = (
    "When was the harbour of Ostmere built?",
    "What colour is the lighthouse?",
    "How many trains a day run to Ostmere?",
    "Which bread does the bakery sell?",
    "How many people does the ferry take, and how long does it take?",
    "Why is the clock of the town hall slow?",
    "What grows in the garden of the school?",
)
"""With those of `SAMPLES` a dozen, which are asked over all of its chunks at once."""

COMPARED_METHODS = ("reuse", "epic", "samkv-guided", "auto")
"""Methods whose answers are compared with full prefill's."""

ANSWER_TOKENS = 16
"""Longest answer that is compared."""

NEGLIGIBLE_KL = 0.05
"""Nats of KL divergence that fewer bits may add to first tokens, on average.

A tenth of what reusing chunks as they are changes on real paragraphs (docs/results.md). The
probability of any token then moves by sqrt(0.05 / 2) = 0.16 at most, on average (Pinsker).
"""

CHUNK_TOKENS, QUESTION_TOKENS = 256, 32
"""Lengths of a chunk and of the question in the prompts for which times are estimated."""

LONGEST_TOKENS = 2**16
"""Most context tokens for which times are estimated."""


def bits_advice(model: Model) -> Generator[Check, None, int]:
    """The effect of each number of bits below the most, then which to take; returns that."""
    negligible = []
    for bits, found in _fewer_bits(model):
        negligible += [] if found.is_warning else [bits]
        yield found
    advised = min(negligible, default=max(STORE_BITS))
    yield _advised_bits(advised)
    return advised


def _fewer_bits(model: Model) -> Iterator[tuple[int, Check]]:
    """The effect of each number of bits below the most: a warning if it is not negligible."""
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

    Each question is asked over every rotation of its chunks, because single prompts differ much.
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


def _advised_bits(advised: int) -> Check:
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


def speed_advice(engine: Engine) -> Check:
    """The contexts for which full prefill is faster than two passes, by costs measured here."""
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
    ends = list(accumulate(lengths))
    chunks = [
        ChunkPart.whole(BlockScheme().of(n), end - n) for n, end in zip(lengths, ends, strict=True)
    ]
    return Layout.of([0] * (ends[-1] + QUESTION_TOKENS), chunks, ())


def answers_advice(model: Model, bits: int, costs: CostModel) -> Check:
    """How often each method gives the greedy answer of full prefill, by chunks stored in ``bits``.

    Each question has all chunks before it, in another rotation. costs: those that ``auto`` goes by.
    """
    engine = Engine(model, store_bits=bits, prefix_bytes=0)
    engine.costs = costs
    chunks = list(dict.fromkeys(chunk for _, of_one in SAMPLES for chunk in of_one))
    questions = [question for question, _ in SAMPLES] + list(FURTHER_QUESTIONS)
    same = Counter(dict.fromkeys(COMPARED_METHODS, 0))
    engine.cache_chunks(chunks)
    try:
        for first, question in enumerate(questions):
            order = [*chunks[first % len(chunks) :], *chunks[: first % len(chunks)]]
            prompt = rag_prompt(question, order, chat=model.has_chat_template)
            asked = partial(engine.stream, prompt, order, max_new_tokens=ANSWER_TOKENS)
            full = "".join(asked(method="recompute"))
            for name in COMPARED_METHODS:
                same[name] += _says(full, asked(method=name))
    except PromptTooLong as error:
        return Check(name="answers", ok=True, is_warning=True, detail=str(error))
    counts = ", ".join(f"{name} {n}" for name, n in same.items())
    return Check(
        name="answers",
        ok=True,
        detail=f"of {len(questions)} greedy answers of up to {ANSWER_TOKENS} tokens over "
        f"{len(chunks)} short chunks, so many are those of full prefill: {counts}; "
        "'samkv tune' compares them on your documents",
    )


def _says(text: str, stream: AnswerStream) -> bool:
    """Whether an answer is ``text``; it is read up to where it differs."""
    said = ""
    with stream:
        for piece in stream:
            said += piece
            if not text.startswith(said):
                return False
    return said == text
