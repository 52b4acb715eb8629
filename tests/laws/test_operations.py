"""How many operations a first token takes, how many launches on a GPU, and that it waits for none.

The counts do not depend on the machine. Whoever makes one smaller makes its bound here smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from samkv_integrations.engine import Engine
from samkv_integrations.runtimes.transformers.entries import quantise
from samkv_integrations.runtimes.transformers.entries.quantise import Entries, EntryFormat
from samkv_integrations.runtimes.transformers.passes.blend import Blend
from samkv_integrations.runtimes.transformers.passes.pass_plan import PassPlan
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.base import Store
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.memory import MemoryStore
from tests.laws.test_device import OnThisThread
from tests.support.models import byte_tokenizer, hf_model
from tests.support.operations import Operations
from tests.support.pretend_device import DEVICE, pretend_device

CHUNKS = [
    f"the {name} of number {name} is at the {name}, " * 4
    for name in ("mill", "inn", "quay", "barn", "ferry")
]
PROMPT = f"A guide: {' and '.join(CHUNKS)} Where is the inn now?"
FEW, MANY = 3, 7


def engine(
    n_layers: int, store: Store, *, device: str | torch.device = "cpu", hot_bytes: int = 0
) -> Engine:
    """Of a small Llama in bfloat16."""
    hf = hf_model("llama", num_hidden_layers=n_layers, head_dim=64).to(torch.bfloat16)
    model = Model(hf.to(device), byte_tokenizer(bos=True), "tiny")
    # no prefix cache, whose copies are no part of a pass
    return Engine(
        model, store, block_size=8, prefix_bytes=0, hot_bytes=hot_bytes,
        scheduler=OnThisThread(model),
    )  # fmt: skip


def filled(n_layers: int, store: Store | None = None) -> Engine:
    made = engine(n_layers, store or MemoryStore())
    made.cache_chunks(CHUNKS)
    return made


def stand_in(counted: Operations, form: EntryFormat) -> Callable[..., None]:
    """In place of the Triton kernel: what it computes, as one launch."""

    def kernel(*given: Tensor | None) -> None:
        held: Any = [None if each is None else each.held for each in given]  # type: ignore[attr-defined]
        codes, rows, group, tokens, key_range, cos, sin, _, keys, values = held
        entries = Entries(
            form=form, codes=codes, rows=rows, group=group, tokens=tokens, key_range=key_range,
            cos=cos[:, None], sin=sin[:, None],
        )  # fmt: skip
        with _disable_current_modes():
            entries.write(keys, values)
        counted.counts["kernel"] += 1

    return kernel


def on_cpu(n_layers: int, method: str) -> Counter[str]:
    """The operations of a whole first token."""
    made = filled(n_layers)
    made.logits(PROMPT, CHUNKS, method=method)
    with Operations() as counted:
        made.logits(PROMPT, CHUNKS, method=method)
    return counted.counts


def on_device(
    n_layers: int, method: str, monkeypatch: pytest.MonkeyPatch, folder: Path, question: int
) -> tuple[Counter[str], Counter[str]]:
    """The launches of a pass, by name, and what its layers wait for.

    question: 1 reads files, 2 copies pinned memory, 3 takes what is on the device.
    """
    store = filled(n_layers, ChunkStore(folder / f"{n_layers}")).store
    through, embed = Blend.through_layers, Model.embed
    launches, before, waits = Counter[str](), Counter[str](), Counter[str]()

    with monkeypatch.context() as patch, pretend_device() as device:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
        quantise._hadamard(32, DEVICE)  # noqa: SLF001  (made once in a process)

        def embedding(*args: Any) -> Tensor:
            hidden = embed(*args)
            before.update(device.waits)
            return hidden

        def counting(blend: Blend, plan: PassPlan, **how: Any) -> Tensor:
            masks = [mask for layer in plan.layers for mask in layer.masks.values()]
            assert all(mask.stride(0) % 8 == 0 for mask in masks), "PyTorch would copy it"
            assert len(set(map(id, masks))) <= 1, "one for all layers"
            with Operations() as counted:
                patch.setattr(quantise, "kernel_of", lambda form: stand_in(counted, form))
                result = through(blend, plan, **how)
            launches.update(counted.counts)
            waits.update(device.waits - before)
            return result

        patch.setattr(Model, "embed", embedding)
        patch.setattr(Blend, "through_layers", counting)
        there = engine(n_layers, store, device=DEVICE, hot_bytes=2**26)
        for _ in range(question):
            for counts in (launches, before, waits):
                counts.clear()
            there.logits(PROMPT, CHUNKS, method=method)
    return launches, waits


def of_a_layer(few: Counter[str], many: Counter[str]) -> dict[str, float]:
    found = {name: (many[name] - few[name]) / (MANY - FEW) for name in many}
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize(
    ("method", "most", "around"),
    [("samkv-guided", 45, 168), ("epic", 45, 168), ("reuse", 45, 164), ("recompute", 27, 137)],
)
def test_operations_on_a_cpu(method: str, most: int, around: int):
    """Of each layer, and of all that is around the layers."""
    few, many = (on_cpu(n_layers, method) for n_layers in (FEW, MANY))
    found = of_a_layer(few, many)
    assert sum(found.values()) <= most, found
    assert few.total() - FEW * sum(found.values()) <= around, few


@pytest.mark.parametrize(
    ("method", "question", "most"),
    [
        ("samkv-guided", 3, 24),
        ("epic", 1, 24),
        ("epic", 2, 24),
        ("epic", 3, 24),
        ("reuse", 3, 24),
        ("recompute", 1, 21),
    ],
)
def test_launches_on_a_gpu(
    method: str, question: int, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The Triton kernel is one, and attention; so is a copy of a layer's entries."""
    few, many = (on_device(n, method, monkeypatch, tmp_path, question) for n in (FEW, MANY))
    found = of_a_layer(few[0], many[0])
    assert sum(found.values()) <= most, found
    for _, waits in (few, many):
        assert not waits, "the host waits between the first layer and the logits"
