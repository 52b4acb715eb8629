"""The steps of a scheduler's thread, counted, and held up where a test wants them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.transformers.passes.decode import Decoder
from samkv_integrations.serving import scheduler as module
from samkv_integrations.serving.scheduler import Scheduler
from tests.support.tested_runtime import model_class

PATIENCE_S = 60


class Steps:
    """Every step of every scheduler, while ``monkeypatch`` lasts.

    counts: steps of each answer, by its decoder, in the order of their first ones. batches: answers
    of each step. threads: where steps were taken. on_step: called before each, may raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[Decoder, int] = {}
        self.batches: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.on_step: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._is_held = False
        kind: Any = model_class()
        decode = kind.decode

        def counted(
            model: Runtime, decoders: Sequence[Decoder], tokens: Sequence[Sequence[int]]
        ) -> Sequence[Tensor]:
            with self._changed:
                self._is_held = True
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._allowed != 0, PATIENCE_S)
                self._is_held = False
                if self._allowed is not None:
                    self._allowed -= 1
                self.threads.add(threading.current_thread())
                self.batches.append(len(decoders))
                for decoder in decoders:
                    self.counts[decoder] = self.counts.get(decoder, 0) + 1
                self._changed.notify_all()
            self.on_step()
            found: Sequence[Tensor] = decode(model, decoders, tokens)
            return found

        monkeypatch.setattr(kind, "decode", counted)
        monkeypatch.setattr(module, "MOST_ROWS", 1)  # a step is a token
        monkeypatch.setattr(module, "LEAST_PART_S", math.inf)  # and interrupts no pass

    @property
    def n(self) -> int:
        return len(self.batches)

    @property
    def of_the_first(self) -> int:
        """Steps of the answer that took one first."""
        return next(iter(self.counts.values()))

    def hold(self) -> None:
        with self._changed:
            self._allowed = 0

    def allow(self, n: int) -> None:
        with self._changed:
            assert self._allowed is not None
            self._allowed += n
            self._is_held = False
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Wait until a step would begin if it were allowed to."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_held, PATIENCE_S)

    def wait_for_answers(self, scheduler: Scheduler, n: int) -> None:
        """Let held steps begin, one after another, until ``n`` answers have begun."""
        while scheduler.load.running + scheduler.load.waiting < n:
            self.wait_until_held()  # of one answer at least
        while scheduler.load.running < n:
            self.wait_until_held()
            self.allow(1)

    def wait_for(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.n >= n, PATIENCE_S)
