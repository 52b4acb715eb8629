"""What a chunk is prefilled after: BOS, made-up documents, a text, or learned embeddings.

The prefix's own entries are dropped, so it costs a question nothing. A learned prefix
(``samkv adapt``, docs/adapt.md) is a safetensors file of embeddings, in place of the documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.files import write_file
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model

_log = logging.getLogger(__name__)

PrefixPolicy = Literal["auto", "documents", "learned", "bos", "none"]

LEARNED_FILE = "samkv-prefix.safetensors"
"""The learned prefix of a folder of chunk caches."""

DOCUMENTS_BEFORE = (
    "[Lake Varen]\nLake Varen is a lake in the north of the country. It is about twelve kilometres "
    "long and is fed by three rivers.\n\n[Anna Holm]\nAnna Holm (born 4 May 1931) was a writer and "
    "teacher. She published nine novels and two collections of poems.\n\n"
)
"""Two made-up documents that each chunk is prefilled after, so that its entries are those of one
document of several. They halve what `reuse` loses on short chunks of SmolLM2
(docs/decisions.md)."""

_MOST_EMBEDDINGS = 1024
_FORMAT = "samkv-prefix-1"


class OtherWeights(InvalidOption):
    """A learned prefix is for other weights than those of the model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedPrefix:
    """Embeddings that stand between BOS and a chunk.

    embeddings: (n, hidden) float32. weights: digests of the weights of the models that they are
    for, the same model in several dtypes; see `Identity`. recipe, figures: how they were made, and
    what they were measured to do; for people.
    """

    embeddings: Tensor
    weights: tuple[str, ...]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of the embeddings: what tells chunk caches of two prefixes apart."""
        return hashlib.blake2b(self.embeddings.numpy().tobytes(), digest_size=16).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, in place of one that is there. Raises InvalidOption if it cannot."""
        file = Path(path)
        notes = {"weights": self.weights, "recipe": self.recipe, "figures": self.figures}
        metadata = {"format": _FORMAT, **{key: json.dumps(value) for key, value in notes.items()}}
        try:
            write_file(file, [save({"embeddings": self.embeddings.contiguous()}, metadata)])
        except (OSError, SafetensorError) as error:
            raise InvalidOption(
                f"{file} cannot be written ({error}); give a folder that exists and has room"
            ) from error
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> LearnedPrefix:
        """The prefix in a file.

        Raises InvalidOption if it is broken, and OtherWeights, which is one, if it is for another
        model or dtype.
        """
        file = Path(path)
        remedy = (
            f"'samkv adapt --model {model.name} --dtype {model.dtype_name}' makes one, and "
            "prefix='documents' does without"
        )
        hidden = model.config.hidden_size
        try:
            if file.exists() and not file.is_file():  # a pipe would be waited for
                raise ValueError("it is no file")
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {_FORMAT!r}")
                notes = {name: json.loads(metadata[name]) for name in
                         ("weights", "recipe", "figures")}  # fmt: skip
                if not isinstance(notes["weights"], list):
                    raise ValueError("it does not list the weights that it is for")
                shape = tuple(opened.get_slice("embeddings").get_shape())
                fits = len(shape) == 2 and shape[1] == hidden and 0 < shape[0] <= _MOST_EMBEDDINGS
                embeddings = opened.get_tensor("embeddings") if fits else torch.empty(0)
        except FileNotFoundError as error:
            raise InvalidOption(f"there is no prefix {str(file)!r}; {remedy}") from error
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise InvalidOption(f"{file} is no learned prefix ({error}); {remedy}") from error
        if model.weights_digest not in notes["weights"]:
            raise OtherWeights(
                f"{file} was learned for other weights than those of {model.name!r} in "
                f"{model.dtype_name}; {remedy}"
            )
        if not fits:
            raise InvalidOption(
                f"{file} holds embeddings of shape {shape}; {model.name!r} takes "
                f"(1 to {_MOST_EMBEDDINGS}, {hidden}); {remedy}"
            )
        # a copy: who writes into the file, which is mapped, must not change an open engine
        is_floating, embeddings = embeddings.is_floating_point(), embeddings.float().clone()
        if not is_floating or not bool(embeddings.isfinite().all()):
            raise InvalidOption(f"{file} holds embeddings that are no finite numbers; {remedy}")
        return cls(
            embeddings=embeddings, weights=tuple(notes["weights"]),
            recipe=notes["recipe"], figures=notes["figures"],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPrefix:
    """What chunks are prefilled after: token ids, then maybe learned embeddings."""

    ids: tuple[int, ...]
    learned: LearnedPrefix | None = None

    @classmethod
    def of(
        cls, model: Model, store: Store, prefix: str | os.PathLike[str], prefix_text: str
    ) -> ChunkPrefix:
        """What an engine's ``prefix`` and ``prefix_text`` stand for.

        With "auto", what lies beside the caches counts if it is for this model.

        Raises InvalidOption if a learned prefix is not there, or not for this model.
        """
        bos = () if prefix == "none" or model.bos_id is None else (model.bos_id,)
        if prefix_text:
            return cls(ids=(*bos, *model.tokenize(prefix_text, special=True)))
        if prefix in ("bos", "none"):
            return cls(ids=bos)
        beside = store.path / LEARNED_FILE if isinstance(store, ChunkStore) else None
        has_learned = beside is not None and beside.is_file()
        if prefix == "learned" and not has_learned:
            raise InvalidOption(
                f"prefix='learned', but there is no {LEARNED_FILE} beside the caches; "
                "'samkv adapt' makes one"
            )
        if prefix != "documents" and (has_learned or prefix != "auto"):
            file = beside if beside and prefix in ("auto", "learned") else prefix
            try:
                return cls(ids=bos, learned=LearnedPrefix.load(file, model))
            except OtherWeights as error:
                if prefix != "auto":
                    raise
                _log.warning("%s; chunks are prefilled after the made-up documents", error)
        return cls(ids=(*bos, *model.tokenize(DOCUMENTS_BEFORE, special=False)))

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """One for each token; -1, which no prompt holds, for what was learned."""
        return (*self.ids, *[-1] * (len(self.learned.embeddings) if self.learned else 0))

    @property
    def name(self) -> str:
        """How a fingerprint calls it."""
        ids = ",".join(map(str, self.ids))
        return f"{ids};learned:{self.learned.digest}" if self.learned else ids

    def embedded(self, model: Model) -> Tensor:
        """(P, hidden), in the model's dtype and on its device."""
        ids = model.embed(torch.tensor([self.ids], dtype=torch.long))[0]
        if self.learned is None:
            return ids
        return torch.cat((ids, self.learned.embeddings.to(ids)))
