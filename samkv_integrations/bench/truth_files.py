"""Full prefill's logits of questions, kept in a folder until another model is measured by them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from samkv_integrations.bench.divergence import Forced

PATTERN = "[0-9a-f]" * 32 + ".*"
"""Names of the files in a folder of `TruthFiles`, whole or not."""


class TruthFiles:
    """A file for each question: the tokens that were forced, and full prefill's logits along them.

    A file takes 4 bytes for each forced token and each word of the vocabulary. ``discard`` and
    ``close`` delete; a process that is killed leaves its files for the next one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, question_id: str, own: Sequence[int], truth: Forced) -> None:
        """Keep what is forced along ``own``, the tokens of full prefill's answer."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {"tokens": torch.tensor(own), "own": truth.own.contiguous()}
        if truth.reference is not None:
            tensors |= {
                "reference": truth.reference.contiguous(),
                "expected": torch.tensor(truth.expected),
            }
        # whole or not at all: a process that is killed here leaves no half file behind
        made = self._file(question_id).with_suffix(".tmp")
        save_file(tensors, made)
        made.replace(self._file(question_id))

    def has(self, question_id: str) -> bool:
        """Whether a question is kept."""
        return self._file(question_id).exists()

    def read(self, question_id: str) -> tuple[list[int], Forced]:
        """The tokens and the logits that were kept of a question."""
        found = load_file(self._file(question_id))
        expected = tuple(found["expected"].tolist()) if "expected" in found else ()
        truth = Forced(own=found["own"], reference=found.get("reference"), expected=expected)
        return found["tokens"].tolist(), truth

    def discard(self, question_id: str) -> None:
        """Delete what is kept of a question, if it is there."""
        self._file(question_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the folder if nothing is in it."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _file(self, question_id: str) -> Path:
        name = hashlib.sha256(question_id.encode()).hexdigest()[:32]
        return self._folder / f"{name}.safetensors"
