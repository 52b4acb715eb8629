"""The query path of one prompt, from its segments to the logits of the first token."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from samkv_integrations.blend import Blend, Check, Evict, LayerView, Read, WorkingCache
from samkv_integrations.chunk import Fingerprint
from samkv_integrations.context import ChunkLost, Context
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.eviction import Eviction
from samkv_integrations.evictor import Evictor
from samkv_integrations.layout import Layout, Selection
from samkv_integrations.methods.parts import (
    Evidence,
    Method,
    RecomputeInexact,
    SelectAll,
    overwrite,
)
from samkv_integrations.model import Model
from samkv_integrations.prompt import Resolved
from samkv_integrations.report import Report


class Query:
    """One prompt on its way through lay out, probe, select, load and blend.

    A cache that turns out broken on the way becomes a chunk computed from its tokens, and the way
    begins again. Nothing computed here is ever written to the store.

    After `first_logits`: ``layout``, ``cache``, and ``evictor`` for what comes after.
    """

    layout: Layout
    cache: WorkingCache
    evictor: Evictor | None

    def __init__(
        self,
        model: Model,
        method: Method,
        resolved: Resolved,
        fingerprint: Fingerprint,
        prefix: tuple[int, ...],
        stable_layers: tuple[int, ...],
        eviction: Eviction | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.eviction = eviction
        self._resolved = resolved
        self._fingerprint = fingerprint
        self._prefix = prefix
        self._stable_layers = stable_layers
        self._bytes_read = 0
        self._probe_s = self._select_s = self._load_s = self._blend_s = 0.0

    def first_logits(self, max_new_tokens: int, context_window: int | None = None) -> Tensor:
        """Logits (vocabulary,) of the answer's first token.

        Raises:
            PromptTooLong: the prompt and ``max_new_tokens`` exceed the context window, which is the
                model's unless a smaller one is given.
        """
        while True:
            self.layout = Layout.of(self._resolved.segments, self._prefix)
            self._check_length(max_new_tokens, context_window)
            context = Context(self.layout, self._resolved.opened, self._fingerprint)
            try:
                return self._run(context, max_new_tokens)
            except ChunkLost as lost:
                self._bytes_read += context.chunks[lost.index].bytes_read
                self._resolved.lose(lost.index, lost.reason)
            finally:
                self._load_s += context.load_s

    def _run(self, context: Context, capacity: int) -> Tensor:
        layout = self.layout
        if layout.n_context <= self.method.recompute.whole_tokens:
            self.method = replace(
                self.method, select=SelectAll(), recompute=RecomputeInexact(), update=overwrite
            )
        method = self.method
        evidence = self._evidence(context)
        if method.select.probe == "layerwise":
            blend, logits = self._read_as_it_goes(context, evidence, capacity)
        else:
            selection = self._select(context, evidence)
            rows = method.recompute.rows(selection, evidence, layout)
            blend, logits = self._blend_over(context, selection.keep, rows, capacity)
        self.cache, self._blend = blend.cache, blend
        return logits

    def _read_as_it_goes(
        self, context: Context, evidence: Evidence, capacity: int
    ) -> tuple[Blend, Tensor]:
        """Layers read what their rows ask for; the last of these passes is the answer's.

        The first pass finds the rows that are worth computing again. If there are any, they take
        part in a second one, and what is kept is chosen with what they have become.
        """
        recompute = self.method.recompute
        blend, logits = self._blend_over(context, partial(self._read, evidence), None, capacity)
        selection = self._chosen(blend, evidence)
        rows = recompute.rows(selection, evidence, self.layout)
        sure = recompute.unless_sure
        if sure is not None and float(logits.float().softmax(-1).max()) >= sure:
            rows = torch.zeros_like(rows)
        if bool(rows.any()):
            self._probe_s, self._blend_s = self._blend_s, 0.0
            blend, logits = self._blend_over(context, partial(self._read, evidence), rows, capacity)
            selection = self._chosen(blend, evidence)
        began, loaded = time.perf_counter(), context.load_s
        blend.settle(selection.keep)
        self._blend_s += time.perf_counter() - began - (context.load_s - loaded)
        return blend, logits

    def _select(self, context: Context, evidence: Evidence) -> Selection:
        """The selection before the answer's pass, by a probe if the method wants one."""
        select, layout = self.method.select, self.layout
        if select.probe == "none":
            return select.choose(None, evidence, layout)
        blocks = select.probe_blocks(layout).repeat(self.model.n_layers, 1)
        blend, _ = self._blend_over(context, blocks, None, None)
        self._probe_s, self._blend_s = self._blend_s, 0.0
        return self._chosen(blend, evidence)

    def _blend_over(
        self, context: Context, keep: Tensor | Read, rows: Tensor | None, capacity: int | None
    ) -> tuple[Blend, Tensor]:
        """One pass, and its logits. capacity: None for a pass that no answer goes on from."""
        method, is_probe = self.method, capacity is None
        blend = Blend(
            self.model, self.layout, context, keep,
            recompute=rows, check=None if is_probe else self._check(), update=method.update,
            positions=method.positions, attend=method.attend,
            asking=is_probe or not isinstance(keep, Tensor), capacity=capacity or 0,
            evict=None if capacity is None else self._evict(capacity),
        )  # fmt: skip
        began, loaded, selected = time.perf_counter(), context.load_s, self._select_s
        logits = blend.run()
        spent = time.perf_counter() - began - (context.load_s - loaded)
        self._blend_s += spent - (self._select_s - selected)
        return blend, logits

    def _evict(self, capacity: int) -> Evict | None:
        """What the next pass evicts with; a pass that is done again begins with a new one."""
        if self.eviction is None:
            self.evictor = None
            return None
        self.evictor = Evictor(
            self.eviction,
            n_tokens=self.layout.n_tokens,
            n_layers=self.model.n_layers,
            capacity=capacity,
        )
        return self.evictor.after_prompt

    def _check(self) -> tuple[int, Check] | None:
        """The layer that decides what later layers recompute, and how."""
        recompute, layout = self.method.recompute, self.layout
        if recompute.check_layer is None:
            return None
        return recompute.check_layer, lambda checked: recompute.rows_after(checked, layout)

    def _evidence(self, context: Context) -> Evidence:
        evidence = context.evidence(self.method.reads, self._stable_layers)
        context_cos, context_sin = self.model.cos_sin(self.layout.context_positions)
        question_cos, question_sin = self.model.cos_sin(self.layout.question)
        return replace(
            evidence,
            context_cos=context_cos,
            context_sin=context_sin,
            question_cos=question_cos,
            question_sin=question_sin,
        ).to(self.model.device)

    def _read(self, evidence: Evidence, view: LayerView) -> Tensor:
        """(Nb,) bool: what the rows of a layer read.

        Their new keys take the place of the codes in ``evidence``, which is this request's own.
        """
        began = time.perf_counter()
        if len(view.stale) and evidence.keys is not None:
            evidence.keys[view.layer, view.stale.to(evidence.keys.device)] = view.stale_keys
        rows = torch.cat((self.layout.question, self.layout.context_positions[view.stale]))
        seen = torch.searchsorted(self.layout.context_positions, rows, right=True)
        cos, sin = self.model.cos_sin(rows)
        read = self.method.select.read(
            torch.cat((view.queries, view.stale_queries), dim=1),
            seen,
            replace(evidence.layer(view.layer), question_cos=cos, question_sin=sin),
            self.layout,
        )
        self._select_s += time.perf_counter() - began
        return read

    def _chosen(self, blend: Blend, evidence: Evidence) -> Selection:
        """The selection by the queries of a pass."""
        began = time.perf_counter()
        select = self.method.select
        first = 0 if select.window is None else -select.window
        assert evidence.question_cos is not None and evidence.question_sin is not None
        asking = replace(
            evidence,
            question_cos=evidence.question_cos[first:],
            question_sin=evidence.question_sin[first:],
        )
        queries = torch.stack(blend.queries)[:, :, first:]
        selection = select.choose(queries, asking, self.layout)
        self._select_s += time.perf_counter() - began
        return selection

    def _check_length(self, max_new_tokens: int, context_window: int | None) -> None:
        window = min(context_window or sys.maxsize, self.model.context_window)
        n_tokens = self.layout.n_tokens
        if n_tokens + max_new_tokens > window:
            raise PromptTooLong(
                f"prompt of {n_tokens} tokens (chunks at full size) and {max_new_tokens} new "
                f"tokens exceed the context window of {window} of {self.model.name!r}; retrieve "
                "fewer chunks or ask for fewer tokens"
            )

    def report(self, ttft_s: float) -> Report:
        """The figures so far; decoding adds its own."""
        layout, blend, model = self.layout, self._blend, self.model
        n_context = layout.n_context + layout.n_uncached
        kept = int(blend.kept[:, layout.block_of_token].sum()) / model.n_layers
        computed = blend.computed_context_rows / model.n_layers
        row_bytes = 2 * model.n_kv_heads * model.head_dim * self._fingerprint.torch_dtype.itemsize
        return Report(
            method=self.method.name,
            eviction=None if self.eviction is None else self.eviction.name,
            model=model.name,
            prompt_tokens=layout.n_tokens,
            context_tokens=n_context,
            kept_ratio=(kept + layout.n_uncached) / n_context if n_context else 1.0,
            recompute_ratio=(computed + layout.n_uncached) / n_context if n_context else 0.0,
            fresh_tokens=layout.n_tokens - n_context,
            chunk_hits=layout.n_chunks,
            chunk_misses=dict(self._resolved.misses),
            bytes_read=self._bytes_read + sum(c.bytes_read for c in self._resolved.opened),
            kv_bytes=blend.kv_bytes,
            full_kv_bytes=model.n_layers * layout.n_tokens * row_bytes,
            decode_kv_bytes=self.cache.kv_bytes,
            probe_s=self._probe_s,
            select_s=self._select_s,
            load_s=self._load_s,
            blend_s=self._blend_s,
            ttft_s=ttft_s,
            completion_tokens=0,
            decode_tokens_per_s=0.0,
        )
