"""What a pass costs on this machine, roughly: enough to say whether full prefill is faster.

A pass over few tokens of a small model is mostly overhead, and cached entries have to be read, so
that full prefill can be faster. ``samkv doctor`` measures the figures for the model and device at
hand.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.quantise import Entries, EntryFormat, groups
from samkv_integrations.methods import Method
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.layout import Layout

MARGIN = 0.95
"""A pass over caches must be estimated below this share of full prefill to be worth taking."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a pass as a sum of its parts, all for one layer.

    layer_s: whatever a layer computes. token_s: each computed token. pair_s: each pair of a
    computed token and one that it attends to. entry_s: de-quantising the entry of a context token,
    and all else that a pass does for it. read_s: reading and checking it, for all layers together
    divided by their number.
    """

    layer_s: float
    token_s: float
    pair_s: float
    entry_s: float
    read_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, float | int) or not 0 <= value < 1e6:
                raise ValueError(f"{field.name}={value!r} is no time in seconds")

    @classmethod
    def assumed(cls, model: Model) -> CostModel:
        """What a machine of today does, where nothing was measured."""
        on_gpu = model.device.type == "cuda"
        flops = 60e12 if on_gpu else 60e9
        return cls(
            layer_s=4e-4 if on_gpu else 3e-4,
            token_s=2 * model.layer_parameters / flops,
            pair_s=4 * model.n_heads * model.head_dim / flops,
            entry_s=(1e-11 if on_gpu else 4e-9) * model.n_kv_heads * model.head_dim,
            # threads read for a GPU, while its layers run
            read_s=(1e-10 if on_gpu else 1e-9) * model.n_kv_heads * model.head_dim,
        )

    def full_prefill_s(self, n_tokens: int, n_held: int = 0) -> float:
        """A layer's share of computing ``n_tokens`` tokens, causally, but the first that are held.

        n_held: tokens whose entries an earlier prompt has left in memory.
        """
        n_rest = n_tokens - n_held
        return self._pass_s(n_rest, n_rest * (n_held + n_tokens + 1) / 2)

    def blended_s(
        self, n_tokens: int, n_context: int, recomputed_ratio: float, n_held: int = 0
    ) -> float:
        """A layer's share of a pass over cached, recomputed and uncached tokens.

        n_context: tokens with a cache. recomputed_ratio: the share of them that is computed again,
        mean over layers. n_held: as above, before the context.
        """
        n_again = n_tokens - n_held - n_context + recomputed_ratio * n_context
        entries_s = n_context * (self.entry_s + self.read_s)
        return self._pass_s(n_again, n_again * n_tokens) + entries_s

    def chunks_s(self, lengths: Sequence[int], n_prefix: int = 0) -> float:
        """A layer's share of computing chunks of these lengths as chunks, kept for later.

        n_prefix: tokens that each of them is prefilled after. They count once a chunk, although
            all chunks share one pass over them: an upper bound.
        """
        with_prefix = [n_prefix + length for length in lengths]
        pairs = sum(length * (length + 1) / 2 for length in with_prefix)
        return self._pass_s(sum(with_prefix), pairs) + 2 * self.entry_s * sum(lengths)

    def _pass_s(self, n_tokens: float, n_pairs: float) -> float:
        return self.layer_s + n_tokens * self.token_s + n_pairs * self.pair_s


def is_whole(
    method: Method,
    costs: CostModel | None,
    layout: Layout,
    blended: Layout,
    missed: Sequence[int] = (),
    n_whole: int = 0,
    n_blended: int = 0,
) -> bool:
    """Whether a method computes the context as a whole, which is full prefill.

    blended: the layout of what stands behind the tokens that are held for a pass over caches.
    missed: tokens of each uncached chunk that counts as a cached one. n_whole, n_blended: first
    tokens of the prompt that are held in memory, for full prefill and for that pass.
    """
    if layout.n_context + sum(missed) <= method.recompute.whole_tokens:
        return True
    if not method.whole_if_faster:
        return False
    assert costs is not None
    full_s = costs.full_prefill_s(layout.n_tokens, n_whole)
    return blended_s(method, costs, blended, missed, n_blended) > MARGIN * full_s


def blended_s(
    method: Method, costs: CostModel, layout: Layout, missed: Sequence[int] = (), n_held: int = 0
) -> float:
    """A layer's share of a request that is not computed as a whole; arguments as in `is_whole`."""
    n_context, n_chunks = layout.n_context + sum(missed), layout.n_chunks + len(missed)
    ratio = method.recompute.most_ratio(n_context, n_chunks)
    return costs.blended_s(layout.n_tokens, n_context, ratio, n_held)


def kept_costs(model: Model, store: Store) -> CostModel:
    """As measured on this machine and kept beside the caches, else as assumed."""
    text = store.note(name_of(model))
    try:
        return CostModel(**json.loads(text or ""))
    except (ValueError, TypeError):  # none, or not what `keep_costs` wrote
        return CostModel.assumed(model)


def keep_costs(model: Model, store: Store, costs: CostModel) -> None:
    """Keep measured costs beside the caches. Raises StoreError if that cannot be written."""
    store.put_note(name_of(model), json.dumps(asdict(costs)))


def name_of(model: Model) -> str:
    """What the costs of a model on its device are kept under."""
    if model.device.type == "cuda" and torch.cuda.is_available():
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name(model.device))
    else:
        device = f"{model.device.type}-{torch.get_num_threads()}-threads"
    return f"costs-{model.weights_digest}-{device}"


@torch.inference_mode()
def measure(model: Model, form: EntryFormat) -> CostModel:
    """The costs on this machine, from passes of some layers over made-up tokens; a few seconds.

    The least of repeated runs, as other work on the machine only ever adds. What disks do is not
    measured: entries are assumed to be read from the system's page cache.
    """
    short, long, far = (min(n, model.context_window) for n in (8, 512, 2048))
    few, some, many = (_seconds(model, partial(_plain_pass, model, n)) for n in (short, long, far))
    # few = layer + short * token + ..., and so on: three equations for three unknowns
    ns = torch.tensor([short, long, far], dtype=torch.float64)
    parts = torch.stack((torch.ones(3, dtype=torch.float64), ns, ns * (ns + 1) / 2), dim=1)
    spent = torch.tensor([few, some, many], dtype=torch.float64)
    layer_s, token_s, pair_s = (max(0.0, x) for x in torch.linalg.lstsq(parts, spent)[0].tolist())
    entry_s = _seconds(model, partial(_dequantise, model, form, far)) / far
    return CostModel(
        layer_s=layer_s, token_s=token_s, pair_s=pair_s, entry_s=entry_s,
        read_s=CostModel.assumed(model).read_s,
    )  # fmt: skip


def _seconds(model: Model, work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of ``work`` if nothing else runs: on a CPU those of its threads, not of a clock."""
    is_cpu, spent = model.device.type == "cpu", []
    work()  # the first time is slower
    for _ in range(repeats):
        began = time.process_time() if is_cpu else time.perf_counter()
        work()
        if is_cpu:
            spent.append((time.process_time() - began) / torch.get_num_threads())
        else:
            torch.cuda.synchronize(model.device)
            spent.append(time.perf_counter() - began)
    return min(spent)


def _plain_pass(model: Model, n_tokens: int) -> None:
    """A layer's share of full prefill."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return model.attention(layer, query, key, value, scaling, None, True)

    hidden = model.embed(torch.zeros(1, n_tokens, dtype=torch.long))
    model.layer(0, hidden, *model.rotation(torch.arange(n_tokens)).of(0), attend)


def _dequantise(model: Model, form: EntryFormat, n_tokens: int) -> None:
    """What one layer of a pass does for stored entries."""
    device = model.device
    heads = form.n_kv_heads if device.type == "cpu" else 1
    shape = (n_tokens, heads, form.head_dim // 2)
    turns = torch.ones(shape, dtype=torch.float32, device=device)
    entries = Entries(
        form=form, codes=torch.zeros(n_tokens, form.n_bytes, dtype=torch.uint8, device=device),
        key_range=torch.ones(form.range_shape(n_tokens), dtype=torch.float16, device=device),
        group=groups(n_tokens, device), cos=turns, sin=turns,
    )  # fmt: skip
    order = torch.arange(n_tokens, device=device)
    for side in entries.keys_and_values():
        side.index_select(0, order)
