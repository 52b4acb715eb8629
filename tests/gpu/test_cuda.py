"""What a GPU must compute as a CPU does, and the limit laws there in bfloat16.

Run with ``pytest -m gpu tests/gpu`` where there is a CUDA device. `tests/laws/test_device.py`
rehearses without one that no tensors of two devices meet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.methods import METHODS, Method
from samkv_integrations.methods.base import RecomputeNone
from samkv_integrations.methods.eviction import EVICTIONS, Eviction
from samkv_integrations.methods.guided import GuidedRecompute
from samkv_integrations.option import STORE_BITS
from samkv_integrations.runtimes.transformers.entries import quantise
from samkv_integrations.runtimes.transformers.entries.hot import HotChunk, copying
from samkv_integrations.runtimes.transformers.entries.quantise import (
    Entries,
    EntryFormat,
    encoder_of,
    groups,
    kernel_of,
)
from samkv_integrations.runtimes.transformers.eviction import Quest
from samkv_integrations.runtimes.transformers.papers.ape import ApeAttention
from samkv_integrations.runtimes.transformers.papers.multi_infllm import MultiInfllmSelect
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.disk import ChunkStore
from tests.support.chunks import encoded
from tests.support.laws import changed, mixed
from tests.support.models import FAMILIES, byte_tokenizer, hf_model, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

# No two blocks are alike: between equal scores rounding would choose.
CHUNKS = [
    "".join(
        f"{name} {at * at} of {chr(97 + at) * 3} stands at {7 * at + 3}, " for at in range(n, n + 9)
    )
    for n, name in enumerate(("mill", "inn", "quay"))
]
PROMPT = f"A guide: {' and '.join(CHUNKS)} Where is the inn?"
FOLLOW = (40, 50, 60, 70)
# As transformers on both: float32 in another order, and logits of these models reach 100.
TIGHT = {"rtol": 1e-4, "atol": 2e-3}


@cache
def on_gpu(family: str, dtype: torch.dtype) -> Model:
    model = hf_model(family).to(dtype).to("cuda")
    return Model(model, byte_tokenizer(bos=not family.startswith("qwen")), f"tiny-{family}")


@cache
def filled(
    family: str, dtype: torch.dtype, store_bits: int, device: str, prefix: str = "documents"
) -> Engine:
    """An engine with the chunks in its store. Both devices accept each other's caches."""
    model = tiny_model(family, dtype) if device == "cpu" else on_gpu(family, dtype)
    made = Engine(model, block_size=8, store_bits=store_bits, prefix=prefix)
    made.cache_chunks(CHUNKS)
    return made


def with_caches_of(engine: Engine, model: Model) -> Engine:
    bits = engine.fingerprint.store_bits
    return Engine(model, engine.store, block_size=8, store_bits=bits)


def rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


@pytest.mark.parametrize("rule", ["none", "quest"])
@pytest.mark.parametrize("method", ["reuse", "recompute", "samkv-guided"])
@pytest.mark.parametrize("store_bits", STORE_BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32_are_those_of_the_cpu(
    family: str, store_bits: int, method: str, rule: str
):
    """The first token's, and those of four steps."""
    on_cpu = filled(family, torch.float32, store_bits, "cpu")
    there = with_caches_of(on_cpu, on_gpu(family, torch.float32))
    assert there.fingerprint.digest == on_cpu.fingerprint.digest
    asked = {"follow": FOLLOW, "method": method, "eviction": rule}
    expected = on_cpu.logits(PROMPT, CHUNKS, **asked)
    torch.testing.assert_close(there.logits(PROMPT, CHUNKS, **asked), expected, **TIGHT)


@pytest.mark.parametrize("rule", [None, "none", *EVICTIONS])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "auto"])
def test_every_method_and_rule_runs(method: str, rule: str | None):
    on_cpu = filled("llama", torch.float32, 4, "cpu")
    there = with_caches_of(on_cpu, on_gpu("llama", torch.float32))
    asked = {"follow": FOLLOW, "method": method, "eviction": rule}
    expected = on_cpu.logits(PROMPT, CHUNKS, **asked)
    torch.testing.assert_close(there.logits(PROMPT, CHUNKS, **asked), expected, **TIGHT)


@pytest.mark.parametrize("share", [0.8, 100])
def test_hot_chunks_are_on_the_device_or_pinned(tmp_path: Path, share: float):
    model, store = on_gpu("llama", torch.float32), ChunkStore(tmp_path)
    cold = Engine(model, store, block_size=8, hot_bytes=0)
    cold.cache_chunks(CHUNKS)
    hot = Engine(model, store, block_size=8, hot_bytes=int(share * store.stats().bytes))
    expected = cold.logits(PROMPT, CHUNKS, method="reuse")
    for _ in range(4):
        assert torch.equal(hot.logits(PROMPT, CHUNKS, method="reuse"), expected)
    with hot.resolve(PROMPT, CHUNKS) as resolved:
        assert all(isinstance(each, HotChunk) for each in resolved.opened)
        assert all(each.hot.entries.is_cuda for each in resolved.opened)  # type: ignore[attr-defined]
    assert Engine(model, store).chunks.reader.max_bytes > 0


def test_a_pass_waits_for_copies_that_are_late(tmp_path: Path):
    """The stream that copies is busy for a second or so, at the second question."""
    model, store = on_gpu("llama", torch.float32), ChunkStore(tmp_path)
    engine = Engine(model, store, block_size=8, hot_bytes=2**26)
    engine.cache_chunks(CHUNKS)
    expected = engine.logits(PROMPT, CHUNKS, method="reuse")
    with torch.cuda.stream(copying(model.device)):
        torch.cuda._sleep(2_000_000_000)  # noqa: SLF001
    for n_late in (3, 0):
        with engine.resolve(PROMPT, CHUNKS) as resolved:
            late = [each for each in resolved.opened if isinstance(each, HotChunk)]
            late = [each for each in late if each.hot.copied]
            assert len(late) == n_late and all(not each.hot.copied[0].query() for each in late)
        assert torch.equal(engine.logits(PROMPT, CHUNKS, method="reuse"), expected)
        torch.cuda.synchronize()


@pytest.mark.parametrize("rule", ["none", "quest"])
@pytest.mark.parametrize("method", ["reuse", "recompute", "samkv-guided"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16_are_no_further_from_float32_than_the_cpu_s(
    family: str, method: str, rule: str
):
    """Rounding to bfloat16 is the only difference: twice what it costs the CPU is allowed."""
    asked = {"follow": FOLLOW, "method": method, "eviction": rule}
    exact, on_cpu, there = (
        filled(family, dtype, 16, device).logits(PROMPT, CHUNKS, **asked)
        for dtype, device in (
            (torch.float32, "cpu"),
            (torch.bfloat16, "cpu"),
            (torch.bfloat16, "cuda"),
        )
    )
    assert rms(there - exact) <= 2 * rms(on_cpu - exact)


def test_an_answer_is_the_cpu_s_and_sampling_repeats_itself():
    on_cpu = filled("llama", torch.float32, 16, "cpu")
    there = with_caches_of(on_cpu, on_gpu("llama", torch.float32))
    asked = {
        "method": "samkv-guided",
        "max_new_tokens": 16,
    }  # auto goes by what a device is fast at
    greedy = [engine.generate(PROMPT, CHUNKS, **asked) for engine in (on_cpu, there)]
    assert greedy[0].text == greedy[1].text
    drawn = [there.generate(PROMPT, CHUNKS, temperature=1.0, seed=7, **asked) for _ in range(2)]
    assert drawn[0].text == drawn[1].text


@dataclass(frozen=True, kw_only=True)
class Law:
    """A method that equals another one, with the rules that the answer goes on with."""

    method: Method
    equals: str
    rule: str | Eviction = "none"

    def __str__(self) -> str:
        method, name = self.method, self.rule if isinstance(self.rule, str) else self.rule.name
        return f"{method.name} {method.recompute} {method.select} {name} is {self.equals}"


ALL_FIRST = GuidedRecompute(first=10**6)
LAWS = [
    Law(method=changed("samkv-guided", first=0, matched=0), equals="reuse"),
    Law(method=replace(METHODS["samkv-guided"], recompute=RecomputeNone()), equals="reuse"),
    Law(method=replace(METHODS["samkv-guided"], recompute=ALL_FIRST), equals="recompute"),
    Law(method=changed("epic", first=0), equals="reuse"),
    Law(method=changed("epic", first=10**6), equals="recompute"),
    Law(method=changed("cacheblend", ratio=1.0), equals="recompute"),
    Law(method=changed("a3", ratio=1.0), equals="recompute"),
    Law(
        method=replace(METHODS["multi-infllm"], select=MultiInfllmSelect(max_kept_ratio=1.0)),
        equals="reuse",
    ),
    Law(
        method=replace(METHODS["ape"], attend=ApeAttention(temperature=1.0, scale=1.0)),
        equals="reuse-local",
    ),
    Law(method=replace(METHODS["recompute"], update=partial(mixed, 1.0)), equals="recompute"),
    Law(method=replace(METHODS["recompute"], update=partial(mixed, 0.0)), equals="reuse"),
    Law(method=METHODS["reuse"], equals="reuse", rule=Quest(budget_ratio=1.0)),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_limit_laws_hold_in_bfloat16(family: str, law: Law):
    """Both sides are one computation, apart by no more than bfloat16 is from float32 in it."""
    there = filled(family, torch.bfloat16, 16, "cuda")
    exact = filled(family, torch.float32, 16, "cpu")
    asked = {"follow": FOLLOW, "eviction": "none"}
    expected = there.logits(PROMPT, CHUNKS, method=law.equals, **asked)
    found = there.logits(PROMPT, CHUNKS, method=law.method, follow=FOLLOW, eviction=law.rule)
    rounding = rms(expected - exact.logits(PROMPT, CHUNKS, method=law.equals, **asked))
    assert rms(found - expected) <= 2 * rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_in_bfloat16_is_the_plain_forward(family: str):
    there = filled(family, torch.bfloat16, 16, "cuda")
    exact = filled(family, torch.float32, 16, "cpu")
    with there.resolve(PROMPT, CHUNKS) as resolved:
        ids = torch.tensor([resolved.token_ids])
    with torch.inference_mode():
        plain = there.model.hf(ids.cuda()).logits[0, -1].float().cpu()
        true = exact.model.hf(ids).logits[0, -1]
    ours = there.logits(PROMPT, CHUNKS, method="recompute")[0]
    assert rms(ours - plain) <= 2 * rms(plain - true)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_after_its_prefix_is_exact_in_bfloat16(family: str):
    there = filled(family, torch.bfloat16, 16, "cuda", "bos")
    exact = filled(family, torch.float32, 16, "cpu", "bos")
    prompt = CHUNKS[0].strip() + " Where is the inn?"
    reused, full = (there.logits(prompt, CHUNKS[:1], method=m) for m in ("reuse", "recompute"))
    true = exact.logits(prompt, CHUNKS[:1], method="recompute")
    assert rms(reused - full) <= 2 * rms(full - true)


@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(1, 32), (3, 64), (8, 128), (2, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_decodes_as_the_operations_do(
    dtype: torch.dtype, n_kv_heads: int, head_dim: int
):
    form = EntryFormat(bits=4, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=dtype)
    for n_tokens in (1, 64, 203):
        _compare(form, n_tokens)


def _compare(form: EntryFormat, n_tokens: int) -> None:
    n_kv_heads, head_dim, dtype = form.n_kv_heads, form.head_dim, form.dtype
    random = torch.Generator("cuda").manual_seed(n_tokens)
    shape = (n_tokens, n_kv_heads, head_dim)
    keys, values = (torch.randn(shape, generator=random, device="cuda").to(dtype) for _ in "kv")
    codes, key_range = encoded(form, 3 * keys + 1, values)
    angle = torch.randn(n_tokens, 1, head_dim // 2, generator=random, device="cuda")
    whole = Entries(
        form=form, codes=codes, key_range=key_range, group=groups(n_tokens, codes.device),
        cos=angle.cos(), sin=angle.sin(),
    )  # fmt: skip
    assert kernel_of(form) is not None
    assert encoder_of(form) is not None, "it came to the bits of the operations"
    some = whole.select(torch.arange(0, n_tokens, 3, device="cuda"))
    for entries in (whole, some):
        found = entries.keys_and_values()
        with mock.patch.object(quantise, "kernel_of", lambda form: None):
            expected = entries.keys_and_values()
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(mine, theirs, rtol=2 * ulp, atol=4 * max(ulp, 2e-6))
