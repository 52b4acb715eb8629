"""The prompt pass: load caches, select blocks, and blend computed and cached entries."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from samkv_integrations.errors import CacheMiss
from samkv_integrations.methods.base import Select
from samkv_integrations.runtimes.base import Begun, Caches, Observer, PromptPass
from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    MIN_CHUNKS,
    PUBLISHED_STABLE_LAYERS,
    stable_layers,
)
from samkv_integrations.runtimes.transformers.entries.cache_arrays import statistics
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.eviction.base import DroppingEviction, SparseEviction
from samkv_integrations.runtimes.transformers.layout import TensorLayout
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.papers.base import (
    SelectionInputs,
)
from samkv_integrations.runtimes.transformers.passes import blend
from samkv_integrations.runtimes.transformers.passes.blend import Blend
from samkv_integrations.runtimes.transformers.passes.decode import Decoder
from samkv_integrations.runtimes.transformers.passes.loader import CachedEntries
from samkv_integrations.runtimes.transformers.passes.method import (
    Check,
    Probe,
    kept_blocks,
    recomputed_tokens,
)
from samkv_integrations.runtimes.transformers.passes.pass_plan import PassPlan, plan_pass
from samkv_integrations.runtimes.transformers.passes.working_cache import (
    CopiedEntries,
    DenseCache,
    LayerwiseEntries,
    SparseCache,
    WorkingCache,
)


class LayerObserver(Observer):
    """An observer that also sees each layer of the pass."""

    def __init__(self, *layers: blend.Observer) -> None:
        self.layers = layers


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The choice of a method for each layer. recompute: (L, Tctx) bool; keep: (L, Nb) bool."""

    keep: Tensor
    recompute: Tensor
    plan: PassPlan


class PromptRun:
    """The pass of one prompt, with its open caches.

    The rotation of cached keys is computed apart from the prompt's: chunks that were computed
    behind a prefix which the prompt lacks may have positions beyond the prompt's length.
    """

    def __init__(self, model: LayeredModel, work: PromptPass, observer: Observer) -> None:
        self.model, self.work, self.observer = model, work, observer
        self.layout = layout = TensorLayout(work.layout)
        self.again, self.n_again = torch.from_numpy(work.held.again), len(work.held.again)
        is_global = work.method.positions == "global"
        cached_at = layout.context_positions if is_global else layout.prefilled_positions
        assert isinstance(work.caches.reader, HotChunks)
        self.cached = CachedEntries(
            layout, work.caches.opened, work.caches.fingerprint, model.rotation(cached_at),
            work.caches.reader,
        )  # fmt: skip
        self._blend = Blend(
            model=model, cached=self.cached, method=work.method,
            rotation=model.rotation(torch.arange(layout.n_tokens)),
            held=cast("LayerwiseEntries | None", work.held.entries),
            is_exact=work.held.n_exact > work.held.n_tokens, pause=observer.pause,
        )  # fmt: skip

    def plan(self, keep: Tensor, recompute: Tensor) -> PassPlan:
        """The plan of a pass, see `plan_pass`."""
        method = self.work.method
        return plan_pass(
            self.model, self.layout, keep, recompute, n_held=self.work.held.n_tokens,
            again=self.again, updates=method.update is not None,
            has_own_attention=method.attend is not None,
        )  # fmt: skip

    def choose(self) -> _Choice:
        """The blocks and tokens that the method chooses; if it needs a probe, that runs first."""
        method = self.work.method
        with self.observer.stage("load"):
            stable = (
                _stable_layers(self.model, self.work.caches) if "statistics" in method.needs else ()
            )
            inputs = self.cached.inputs(method.needs, stable)
        return self._chosen(self._probe(method.select), inputs)

    def _probe(self, select: Select) -> Tensor | None:
        if (blocks := select.probe_blocks(self.layout)) is None:
            return None
        n_layers = self.model.n_layers
        nothing = torch.zeros(n_layers, self.layout.n_context, dtype=torch.bool)
        plan = self.plan(blocks.expand(n_layers, -1), nothing)
        probe = Probe(
            select=select, layout=self.layout, rotation=self._blend.rotation,
            device=self.model.layer_devices[0],
        )  # fmt: skip
        with self.observer.stage("load"):
            self.cached.load(plan.blocks)
        with self.observer.stage("probe"):
            replace(self._blend, observers=(probe,)).through_layers(plan)
            return probe.scores

    def _chosen(self, scores: Tensor | None, inputs: SelectionInputs) -> _Choice:
        with self.observer.stage("select"):
            keep = kept_blocks(self.work.method, scores, inputs, self.layout)
            recompute = recomputed_tokens(self.work.method, keep, inputs, self.layout)
            return _Choice(keep=keep, recompute=recompute, plan=self.plan(keep, recompute))

    def blend(
        self, choice: _Choice, cache: WorkingCache, copied: CopiedEntries | None
    ) -> tuple[Tensor, PassPlan]:
        """The logits of the first token, and the plan that the last layers followed."""
        part, check = self.work.method.recompute, None
        observers = self.observer.layers if isinstance(self.observer, LayerObserver) else ()
        if part.check_layer is not None:
            first = part.check_layer + 1

            def replan(chosen: Tensor) -> PassPlan:
                later = choice.recompute.clone()
                later[first:] = chosen
                return self.plan(choice.keep, later)

            check = Check(recompute=part, layout=self.layout, cached=self.cached, replan=replan)
            observers = (*observers, check)
        with self.observer.stage("load"):
            # until the check layer is computed, any kept entry may be needed
            self.cached.load(choice.plan.blocks if check is None else choice.keep)
        with self.observer.stage("blend"):
            logits = replace(
                self._blend, cache=cache, prefix_to_fill=copied, observers=observers
            ).run(choice.plan)
        return logits, choice.plan if check is None or check.plan is None else check.plan

    def working_cache(self) -> WorkingCache:
        """The empty cache of the answer."""
        model, work, rule = self.model, self.work, self.work.eviction
        n_layers, n_tokens = model.n_layers, self.layout.n_tokens
        if isinstance(rule, SparseEviction):
            return SparseCache(
                n_layers, self.cached, rule, rule.budget(self.layout.n_context), work.capacity,
                work.method.attend, n_tokens=n_tokens, model=model,
            )  # fmt: skip
        return DenseCache(
            n_layers, work.capacity, n_tokens=n_tokens, method_attention=work.method.attend,
            rule=rule if isinstance(rule, DroppingEviction) else None, model=model,
            keeps_all=work.keeps,
        )  # fmt: skip


def run_prompt(model: LayeredModel, work: PromptPass, observer: Observer) -> Begun:
    """Compute a prompt's pass, see `Runtime.begin`."""
    run = PromptRun(model, work, observer)
    with run.cached:
        choice = run.choose()
        cache = run.working_cache()
        copied = CopiedEntries(n_tokens=work.n_copied) if work.n_copied else None
        logits, plan = run.blend(choice, cache, copied)
        if isinstance(cache, DenseCache) and work.held.entries is not None and run.n_again:
            cache.lend(run.again, cast("LayerwiseEntries", work.held.entries))
        return _begun(run, cache, plan, logits, copied)


def _begun(
    run: PromptRun, cache: WorkingCache, plan: PassPlan, logits: Tensor,
    copied: CopiedEntries | None,
) -> Begun:  # fmt: skip
    layout, n_layers = run.layout, run.model.n_layers
    computed = plan.computed | layout.uncached[layout.context_positions]
    of_chunks = torch.from_numpy(run.work.of_chunks)
    stays = layout.uncached.repeat(n_layers, 1)
    stays[:, layout.context_positions] |= plan.kept[:, layout.block_of_token]
    n_attended = 0.0
    for layer, n_of_chunks in enumerate((stays & of_chunks).sum(1).tolist()):
        of_stays = partial(torch.masked_select, of_chunks, stays[layer])
        n_attended += cache.attended(layer, n_of_chunks, of_stays)
    entries = cache if run.work.keeps and isinstance(cache, DenseCache) else None
    return Begun(
        sequence=Decoder(run.model, cache, layout.n_tokens, entries), logits=logits, copied=copied,
        computed=computed.double().mean(0).numpy(),
        is_read=plan.blocks.any(0)[layout.block_of_token].numpy(),
        n_attended=n_attended / n_layers,  # one division: all of the context is exact
    )  # fmt: skip


def _stable_layers(model: LayeredModel, caches: Caches) -> tuple[int, ...]:
    """The layers N* (paper: Appendix A.2): those published for this shape, or a vote of chunks.

    The first stored chunks by key vote, so that the order of ingest does not matter.
    """
    config = model.config
    shape = (config.model_type, model.n_layers, config.hidden_size, model.n_kv_heads)
    if shape in PUBLISHED_STABLE_LAYERS:
        return PUBLISHED_STABLE_LAYERS[shape]
    keys = tuple(caches.keys(2 * MIN_CHUNKS))
    if len(keys) < MIN_CHUNKS:
        return stable_layers(model.n_layers, None)
    if (found := model.stable_layers.get(keys)) is None:
        votes = []  # (L,) bool each
        for key in keys:
            with suppress(CacheMiss), caches.reader.open(key, caches.fingerprint) as stored:
                votes.append(statistics(stored).stable)
        found = stable_layers(model.n_layers, torch.stack(votes) if votes else None)
        model.stable_layers = {keys: found}  # votes of other chunks are out of date
    return found
