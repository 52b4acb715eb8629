"""Where a request waits for its device, and that tensors of two devices never meet.

There is no device here: `tests/support/pretend_device.py` holds tensors to a GPU's rules and counts
waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from samkv_integrations.engine import Engine
from samkv_integrations.errors import CacheMiss
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.option import STORE_BITS
from samkv_integrations.runtimes.transformers import runtime
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.runtimes.transformers.passes import loader
from samkv_integrations.runtimes.transformers.passes.blend import Blend
from samkv_integrations.runtimes.transformers.passes.loader import LAYERS_TOGETHER, CachedEntries
from samkv_integrations.runtimes.transformers.passes.prefill import PrefilledChunks
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.store.memory import MemoryChunk, MemoryStore
from tests.support.covering import covering
from tests.support.models import byte_tokenizer, hf_model
from tests.support.pretend_device import DEVICE, Device, OnDevice, pretend_device

CHUNKS = [f"the {name} of number {name} is at the {name}, " * 4 for name in ("mill", "inn", "quay")]
PROMPT = f"A guide: {' and '.join(CHUNKS)} Where is the inn?"
FOLLOW = (40, 50)
# Attention there is the plain computation, here a fused kernel: float32 in another order, and
# logits of this model reach 100.
AS_CLOSE = {"rtol": 1e-4, "atol": 1e-3}


class OnThisThread(Scheduler):
    """Where the device is pretended, which is a matter of one thread."""

    def run(self, work: Callable[[Callable[[], None]], Any], *, owner: str = "") -> Any:
        with torch.inference_mode():
            return work(lambda: None)


def engine(store: MemoryStore | None = None, *, n_layers: int = 4, **options: object) -> Engine:
    hf = hf_model("llama", num_hidden_layers=n_layers)
    model = Model(hf.to("cpu" if store is None else DEVICE), byte_tokenizer(bos=True), "tiny")
    return Engine(
        model, store, block_size=8, scheduler=OnThisThread(model), prefix_bytes=0, **options
    )


@cache
def filled(*, n_layers: int = 4, store_bits: int = 4) -> Engine:
    made = engine(n_layers=n_layers, store_bits=store_bits)
    made.cache_chunks(CHUNKS)
    return made


class Waits:
    """How often each pass and each step has waited, by what it waited for."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[dict[str, int]] = []
        self.steps: list[dict[str, int]] = []
        through = self._counting(device, Blend.through_layers, self.passes)
        monkeypatch.setattr(Blend, "through_layers", through)
        monkeypatch.setattr(Model, "decode", self._counting(device, Model.decode, self.steps))

    def _counting(
        self, device: Device, function: Callable[..., Any], into: list[dict[str, int]]
    ) -> Callable[..., Any]:
        def counting(*args: object, **options: object) -> Any:
            before = Counter(device.waits)
            result = function(*args, **options)
            into.append(dict(device.waits - before))
            return result

        return counting


def waits_of(monkeypatch: pytest.MonkeyPatch, n_layers: int, **asked: object) -> Waits:
    on_cpu = filled(n_layers=n_layers)
    with monkeypatch.context() as patch, pretend_device() as device:
        there = engine(on_cpu.store, n_layers=n_layers)
        waits = Waits(device, patch)
        there.logits(PROMPT, CHUNKS, follow=FOLLOW, **asked)
    return waits


def test_a_sum_over_two_devices_fails_as_on_a_gpu():
    with pretend_device():
        there = torch.arange(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.arange(3)
        assert torch.equal((there + torch.tensor(1)).cpu(), torch.tensor([1, 2, 3]))


EVERYTHING = covering(
    # auto is full prefill or epic, and costs differ between devices
    [method for method in METHODS if method != "auto"], ["none", *EVICTIONS], list(STORE_BITS)
)  # fmt: skip


@pytest.mark.parametrize(("method", "rule", "store_bits"), EVERYTHING)
def test_tensors_of_two_devices_never_meet(method: str, rule: str, store_bits: int):
    """A whole request but for the sampler; its logits are those of the CPU."""
    on_cpu = filled(store_bits=store_bits)
    asked = {"follow": FOLLOW, "method": method, "eviction": rule}
    expected = on_cpu.logits(PROMPT, CHUNKS, **asked)
    with pretend_device():
        there = engine(on_cpu.store, store_bits=store_bits)
        found = there.logits(PROMPT, CHUNKS, **asked)
    torch.testing.assert_close(found, expected, **AS_CLOSE)


def test_chunks_are_cached_from_one_device():
    """Ingest; 16 bits, where a rounding error does not become another code."""
    expected = filled(store_bits=16).logits(PROMPT, CHUNKS, method="samkv-guided")
    with pretend_device():
        there = engine(MemoryStore(), store_bits=16)
        there.cache_chunks(CHUNKS)
        found = there.logits(PROMPT, CHUNKS, method="samkv-guided")
    torch.testing.assert_close(found, expected, **AS_CLOSE)


def ingest_of(n_chunks: int, monkeypatch: pytest.MonkeyPatch, n_layers: int = 4) -> Counter[str]:
    """What one batch of chunks of two lengths costs, without the prefix and the hash of weights."""
    texts = [f"{'the mill stands by the quay ' * (1 + at % 2)}{at:2}" for at in range(n_chunks)]
    costs: Counter[str] = Counter()
    through, encode = runtime.prefill, EntryFormat.encode_chunks

    def counting(*args: Any) -> PrefilledChunks:
        before, n_before = Counter(device.waits), device.n_operations
        caches = through(*args)
        costs.update(passes=1, operations=device.n_operations - n_before)
        costs.update({f"waits {name}": n for name, n in (device.waits - before).items()})
        return caches

    def counting_encode(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        n_before = device.n_operations
        found = encode(*args)
        costs.update(quantising=device.n_operations - n_before)
        return found

    with monkeypatch.context() as patch, pretend_device() as device:
        patch.setattr(runtime, "prefill", counting)
        patch.setattr(EntryFormat, "encode_chunks", counting_encode)
        there = engine(MemoryStore(), n_layers=n_layers)
        there.cache_chunks(texts)
        assert all(map(there.is_cached, texts))
    return costs


def test_a_batch_costs_as_much_for_many_chunks_as_for_few(monkeypatch: pytest.MonkeyPatch):
    """One pass; one copy of each tensor; the host waits for the last one, and for one number."""
    ingest_of(2, monkeypatch)  # makes what is made once a process
    few, many = (ingest_of(n_chunks, monkeypatch) for n_chunks in (4, 24))
    assert few == many
    assert few["passes"] == 1 and few["waits to the host"] == 6 and few["waits a number"] == 1
    assert few["quantising"] <= 90, "views included, for all layers"
    more = ingest_of(4, monkeypatch, n_layers=6)
    layer = (more["operations"] - few["operations"]) / 2
    assert {**more, "operations": 0} == {**few, "operations": 0}
    assert layer <= 170, "its own products and the views included"


def test_a_chunk_without_a_cache_is_computed_on_the_device():
    on_cpu = filled()
    missing = [*CHUNKS[:2], "a chunk that nobody cached, about the ferry. "]
    prompt = f"A guide: {' and '.join(missing)} Where is the inn?"
    expected = on_cpu.logits(prompt, missing, method="samkv-guided")
    with pretend_device():
        found = engine(on_cpu.store).logits(prompt, missing, method="samkv-guided")
    torch.testing.assert_close(found, expected, **AS_CLOSE)


def spread_engine(family: str, store: MemoryStore) -> Engine:
    """The last two layers are on the CPU, as of a model that is larger than its GPU."""
    hooks = pytest.importorskip("accelerate.hooks")
    hf = hf_model(family).to(DEVICE)
    for module in (*hf.model.layers[-2:].to("cpu"), hf.model.norm):
        place = DEVICE if module is hf.model.norm else "cpu"
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=place))
    hf.hf_device_map = {"": DEVICE, "model.layers.last_two": "cpu"}
    model = Model(hf, byte_tokenizer(bos=True), "tiny")
    assert model.device == DEVICE
    here = torch.device("cpu")
    assert model.layer_devices == (*[DEVICE] * (model.n_layers - 2), here, here)
    return Engine(model, store, block_size=8, store_bits=16, scheduler=OnThisThread(model))


@pytest.mark.parametrize(
    ("family", "method"),
    covering(["llama", "gemma2", "phi3", "cohere2"], ["recompute", "samkv-guided", "epic"]),
)
def test_layers_on_two_devices_of_families(family: str, method: str):
    """Chunks are cached there, and are those that the CPU caches."""
    on_cpu = Engine(
        Model(hf_model(family), byte_tokenizer(bos=True), "tiny"), block_size=8, store_bits=16
    )
    on_cpu.cache_chunks(CHUNKS)
    asked = {"follow": FOLLOW, "method": method}
    expected = on_cpu.logits(PROMPT, CHUNKS, **asked)
    with pretend_device():
        found = spread_engine(family, on_cpu.store).logits(PROMPT, CHUNKS, **asked)
        there = spread_engine(family, MemoryStore())
        there.cache_chunks(CHUNKS)
        own = there.logits(PROMPT, CHUNKS, **asked)
        assert all(map(there.is_cached, CHUNKS))
    torch.testing.assert_close(found, expected, **AS_CLOSE)
    torch.testing.assert_close(own, expected, **AS_CLOSE)


def test_entries_left_on_the_host_fail(monkeypatch: pytest.MonkeyPatch):
    stored, on_cpu = CachedEntries.stored, filled()

    def stored_on_host(cached: CachedEntries, layer: int) -> tuple[Tensor, Tensor]:
        codes, key_range = stored(cached, layer)
        assert isinstance(codes, OnDevice)
        return codes.held, key_range

    monkeypatch.setattr(CachedEntries, "stored", stored_on_host)
    with pretend_device():
        there = engine(on_cpu.store)
        with pytest.raises(RuntimeError, match="same device"):
            there.logits(PROMPT, CHUNKS, method="reuse")


@pytest.mark.parametrize("fails_at", [0, 4])
def test_a_chunk_that_fails_while_layers_run_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
):
    """Threads read six layers of each chunk in two parts. The answer begins again without it."""
    on_cpu, read = filled(n_layers=6), MemoryChunk.read_layers
    bad = on_cpu.key_of(CHUNKS[1])
    expected = on_cpu.logits(PROMPT, [CHUNKS[0], CHUNKS[2]], method="reuse")
    whole = on_cpu.logits(PROMPT, CHUNKS, method="reuse")
    assert LAYERS_TOGETHER == 4
    failed: list[int] = []

    def failing(chunk: MemoryChunk, first: int, out: list[Tensor]) -> None:
        if chunk.key == bad and first == fails_at:
            failed.append(first)
            raise CacheMiss("io", "unplugged")
        read(chunk, first, out)

    monkeypatch.setattr(MemoryChunk, "read_layers", failing)
    with pretend_device():
        there = engine(on_cpu.store, n_layers=6)
        found = there.logits(PROMPT, CHUNKS, method="reuse")
    assert failed == [fails_at]
    torch.testing.assert_close(found, expected, **AS_CLOSE)
    assert not torch.allclose(found, whole, **AS_CLOSE)


@contextmanager
def no_thread_to_read() -> Iterator[Callable[[], object]]:
    """All threads that read for a device are busy until what it gives is called."""
    goes_on = Event()
    pool = ThreadPoolExecutor(2)
    busy = [pool.submit(goes_on.wait, 60) for _ in range(2)]
    with mock.patch.object(loader, "readers", lambda *_: pool), pool:
        yield goes_on.set
        assert not any(each.done() for each in busy) or goes_on.is_set(), "somebody waited"
        goes_on.set()


@pytest.mark.parametrize("method", ["cacheblend", "a3"])
def test_a_layer_that_needs_no_entries_may_be_done_with_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    on_cpu, release = filled(n_layers=6), CachedEntries.release
    expected = on_cpu.logits(PROMPT, CHUNKS, method=method)
    with no_thread_to_read() as go_on, pretend_device():

        def released(cached: CachedEntries, layer: int) -> None:
            release(cached, layer)
            go_on()

        monkeypatch.setattr(CachedEntries, "release", released)
        found = engine(on_cpu.store, n_layers=6).logits(PROMPT, CHUNKS, method=method)
    torch.testing.assert_close(found, expected, **AS_CLOSE)


def test_a_request_that_ends_does_not_wait_for_what_nobody_reads_yet(
    monkeypatch: pytest.MonkeyPatch,
):
    on_cpu = filled(n_layers=6)

    def fail(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(Blend, "through_layers", fail)
    with no_thread_to_read(), pretend_device():
        with pytest.raises(InterruptedError):
            engine(on_cpu.store, n_layers=6).logits(PROMPT, CHUNKS, method="reuse")


# as all others select, check and update
@pytest.mark.parametrize("method", ["reuse", "multi-infllm", "cacheblend", "samkv-guided"])
def test_no_method_waits_for_a_layer(monkeypatch: pytest.MonkeyPatch, method: str):
    few, many = (waits_of(monkeypatch, n_layers, method=method) for n_layers in (3, 5))
    assert few.passes == many.passes and few.steps == many.steps
    assert few.passes and few.steps
