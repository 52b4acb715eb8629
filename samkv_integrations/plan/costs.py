"""Estimates of what a pass costs, to decide whether full prefill is faster.

Few tokens of a small model are mostly overhead, and cached entries have to be read, so full prefill
may be faster than reuse. ``samkv doctor`` measures the figures for a model and its device.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.methods import Method
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.runtimes.transformers.entries.quantise import Entries, EntryFormat, groups
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.store.base import Notes

MARGIN = 0.95
"""Caches are used if their pass is estimated below this share of full prefill."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one layer of a pass, as a sum of parts.

    layer_s: constant. token_s: for each computed token. pair_s: for each pair of a computed token
    and one that it attends to. entry_s: for each cached context token, de-quantising included.
    read_s: for reading and verifying it, of all layers divided by their number.
    """

    layer_s: float
    token_s: float
    pair_s: float
    entry_s: float
    read_s: float

    @classmethod
    def assumed(cls, model: Model) -> CostModel:
        """Figures of a typical machine, for when nothing was measured."""
        on_gpu = model.device.type == "cuda"
        flops = 60e12 if on_gpu else 60e9
        return cls(
            layer_s=4e-4 if on_gpu else 3e-4,
            token_s=2 * model.layer_parameters / flops,
            pair_s=4 * model.n_heads * model.head_dim / flops,
            entry_s=(1e-11 if on_gpu else 4e-9) * model.n_kv_heads * model.head_dim,
            # for a GPU, threads read while layers run
            read_s=(1e-10 if on_gpu else 1e-9) * model.n_kv_heads * model.head_dim,
        )

    def full_prefill_s(self, n_tokens: int, n_held: int = 0) -> float:
        """A layer of full prefill over ``n_tokens``, of which ``n_held`` are in memory."""
        n_rest = n_tokens - n_held
        return self._pass_s(n_rest, n_rest * (n_held + n_tokens + 1) / 2)

    def blended_s(
        self, method: Method, layout: Layout, missed: Sequence[int] = (), n_held: int = 0
    ) -> float:
        """A layer of a pass over the caches of ``layout``.

        missed: tokens of each chunk that would be computed and then count as cached. n_held: first
        tokens that are in memory.
        """
        n_context, n_chunks = layout.n_context + sum(missed), layout.n_chunks + len(missed)
        ratio = method.recompute.most_ratio(n_context, n_chunks)
        n_again = layout.n_tokens - n_held - n_context + ratio * n_context
        entries_s = n_context * (self.entry_s + self.read_s)
        return self._pass_s(n_again, n_again * layout.n_tokens) + entries_s

    def chunks_s(self, lengths: Sequence[int], n_prefix: int = 0) -> float:
        """A layer of computing and storing chunks of these lengths.

        n_prefix: tokens of their prefix, which count once for each chunk: an upper bound.
        """
        with_prefix = [n_prefix + length for length in lengths]
        pairs = sum(length * (length + 1) / 2 for length in with_prefix)
        return self._pass_s(sum(with_prefix), pairs) + 2 * self.entry_s * sum(lengths)

    def _pass_s(self, n_tokens: float, n_pairs: float) -> float:
        return self.layer_s + n_tokens * self.token_s + n_pairs * self.pair_s


def is_whole(method: Method, costs: CostModel | None, layout: Layout, n_held: int = 0) -> bool:
    """Whether a method computes all that is not in memory, as full prefill does.

    costs: None if the method does not ask which is faster. layout: of the prompt, with the chunks
    behind the first ``n_held`` tokens, which are in memory.
    """
    if not layout.n_context:
        return True
    if costs is None:
        return False
    full_s = costs.full_prefill_s(layout.n_tokens, n_held)
    return costs.blended_s(method, layout, n_held=n_held) > MARGIN * full_s


def kept_costs(model: Model, store: Notes) -> CostModel:
    """The costs kept beside the caches for this machine, else the assumed ones."""
    text = store.note(name_of(model))
    try:
        kept = CostModel(**json.loads(text or ""))
        if all(0 <= seconds < 1e6 for seconds in asdict(kept).values()):
            return kept
    except (ValueError, TypeError):  # none, or damaged
        pass
    return CostModel.assumed(model)


def keep_costs(model: Model, store: Notes, costs: CostModel) -> None:
    """Write measured costs beside the caches. Raises StoreError if that fails."""
    store.put_note(name_of(model), json.dumps(asdict(costs)))


def name_of(model: Model) -> str:
    """The name under which the costs of a model on its device are kept."""
    if model.device.type == "cuda" and torch.cuda.is_available():
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name(model.device))
    else:
        device = f"{model.device.type}-{torch.get_num_threads()}-threads"
    return f"costs-{model.weights_digest}-{device}"


@torch.inference_mode()
def measure(model: Model, form: EntryFormat) -> CostModel:
    """Measure the costs on this machine, by passes of one layer over made-up tokens.

    The minimum of repeated runs counts, as other work on the machine only adds time. Disks are not
    measured: entries are assumed to be in the system's page cache.
    """

    def full_prefill(n_tokens: int) -> None:
        hidden = model.embed(torch.zeros(1, n_tokens, dtype=torch.long))
        model.layer(0, hidden, *model.rotation(torch.arange(n_tokens)).of(0), attend)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return model.attention(layer, query, key, value, scaling, None, True)

    def dequantise(n_tokens: int) -> None:
        device = model.device
        heads = form.n_kv_heads if device.type == "cpu" else 1
        turns = torch.ones(n_tokens, heads, form.head_dim // 2, device=device, dtype=torch.float32)
        entries = Entries(
            form=form, codes=torch.zeros(n_tokens, form.n_bytes, dtype=torch.uint8, device=device),
            key_range=torch.ones(form.range_shape(n_tokens), dtype=torch.float16, device=device),
            group=groups(n_tokens, device), cos=turns, sin=turns,
        )  # fmt: skip
        order = torch.arange(n_tokens, device=device)
        for side in entries.keys_and_values():
            side.index_select(0, order)

    # three lengths, and three unknowns: layer_s + n * token_s + n (n + 1) / 2 * pair_s
    lengths = [min(n, model.context_window) for n in (8, 512, 2048)]
    ns = torch.tensor(lengths, dtype=torch.float64)
    parts = torch.stack((torch.ones(3, dtype=torch.float64), ns, ns * (ns + 1) / 2), dim=1)
    spent = torch.tensor(
        [_seconds(model, partial(full_prefill, n)) for n in lengths], dtype=torch.float64
    )
    layer_s, token_s, pair_s = (max(0.0, x) for x in torch.linalg.lstsq(parts, spent)[0].tolist())
    return CostModel(
        layer_s=layer_s, token_s=token_s, pair_s=pair_s,
        entry_s=_seconds(model, partial(dequantise, lengths[-1])) / lengths[-1],
        read_s=CostModel.assumed(model).read_s,
    )  # fmt: skip


def _seconds(model: Model, work: Callable[[], object], repeats: int = 5) -> float:
    """Least seconds of ``work``; on a CPU its threads' time, which other programs do not add to."""
    is_cpu, spent = model.device.type == "cpu", []
    work()  # the first run is slower
    for _ in range(repeats):
        began = time.process_time() if is_cpu else time.perf_counter()
        work()
        if is_cpu:
            spent.append((time.process_time() - began) / torch.get_num_threads())
        else:
            torch.cuda.synchronize(model.device)
            spent.append(time.perf_counter() - began)
    return min(spent)
