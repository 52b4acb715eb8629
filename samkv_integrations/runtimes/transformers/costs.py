"""The costs of a model's passes on its device: assumed and measured.

``samkv doctor`` measures them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.methods.costs import CostModel
from samkv_integrations.runtimes.transformers.entries.quantise import Entries, EntryFormat, groups
from samkv_integrations.runtimes.transformers.model.model import LayeredModel


def assumed_costs(model: LayeredModel) -> CostModel:
    """The costs of a typical machine, used until costs are measured."""
    on_gpu = model.device.type == "cuda"
    flops = 60e12 if on_gpu else 60e9
    return CostModel(
        layer_s=4e-4 if on_gpu else 3e-4,
        token_s=2 * model.layer_parameters / flops,
        pair_s=4 * model.n_heads * model.head_dim / flops,
        entry_s=(1e-11 if on_gpu else 4e-9) * model.n_kv_heads * model.head_dim,
        # with a GPU, threads read entries while layers run
        read_s=(1e-10 if on_gpu else 1e-9) * model.n_kv_heads * model.head_dim,
    )


def name_of(model: LayeredModel) -> str:
    """The name under which the costs of a model on its device are kept."""
    if model.device.type == "cuda" and torch.cuda.is_available():
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name(model.device))
    else:
        device = f"{model.device.type}-{torch.get_num_threads()}-threads"
    return f"costs-{model.weights_digest}-{device}"


@torch.inference_mode()
def measure(model: LayeredModel, form: EntryFormat) -> CostModel:
    """Measure the costs on this machine, by passes of one layer over made-up tokens.

    The minimum of repeated runs counts, because other work on the machine only adds time. Disk
    reads are not measured: entries are assumed to be in the system's page cache.
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
        read_s=assumed_costs(model).read_s,
    )  # fmt: skip


def _seconds(model: LayeredModel, work: Callable[[], object]) -> float:
    """Least seconds of ``work``. On a CPU this is CPU time, to which other programs add nothing."""
    is_cpu, spent = model.device.type == "cpu", []
    work()  # the first run is slower
    for _ in range(5):
        began = time.process_time() if is_cpu else time.perf_counter()
        work()
        if is_cpu:
            spent.append((time.process_time() - began) / torch.get_num_threads())
        else:
            torch.cuda.synchronize(model.device)
            spent.append(time.perf_counter() - began)
    return min(spent)
