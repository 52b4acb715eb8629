"""Which model a load asks, and which prompts: the questions of a set, or random words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samkv_integrations.bench import load_prompts, shapes
from samkv_integrations.bench.data import BUILTIN, SETS, SHORT, load
from samkv_integrations.bench.load_prompts import Prompts, WordsShape
from samkv_integrations.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """name: of the model, for people. served: what ``samkv serve --model`` takes."""

    name: str
    served: str
    prompts: Prompts


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is asked what, as options name it; None for what was not given.

    url: of a running server, whose model and place of computing are its own. model: as for ``samkv
    serve``; a running server's name for it. shape, layers: random weights, which are asked random
    words unless ``questions`` are given. questions: a name of `SETS` or a JSON Lines file.
    n_chunks, chunk_tokens, warm_share: of `WordsShape`.

    Raises UnknownOption or InvalidOption for what does not exist, or does not go together.
    """

    url: str | None = None
    model: str | None = None
    shape: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    questions: str | None = None
    n_chunks: int | None = None
    chunk_tokens: int | None = None
    warm_share: float | None = None
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        elsewhere = {
            "shape": self.shape, "layers": self.layers,
            "dtype": self.dtype if self.dtype != "auto" else None,
            "device": self.device if self.device != "auto" else None,
        }  # fmt: skip
        if self.url is not None:
            self._refuse(elsewhere, f"url={self.url!r} is a server that runs already")
        if self.shape is None:
            self._refuse({"layers": self.layers}, "no shape is given")
        elif self.model is not None:
            raise InvalidOption(f"model={self.model!r} and shape={self.shape!r}; give one of them")
        else:
            shapes.check(self.shape, self.layers, self.dtype)
        if self.words is None:
            self._refuse(
                {
                    "chunks": self.n_chunks, "chunk_tokens": self.chunk_tokens,
                    "warm_share": self.warm_share,
                },
                "questions have their own documents; random words come with a shape, and without "
                "questions",
            )  # fmt: skip

    def _refuse(self, given: Mapping[str, object], why: str) -> None:
        for name, value in given.items():
            if value is not None:
                raise InvalidOption(f"{name}={value}, but {why}; leave it out")

    @property
    def name(self) -> str:
        """Of the model, as far as it is known before a server names it."""
        return self.model or self.shape or ("unknown" if self.url else BUILTIN)

    @property
    def words(self) -> WordsShape | None:
        """The shape of prompts of random words; None if questions are asked."""
        if self.shape is None or self.questions is not None:
            return None
        given = {
            "n_chunks": self.n_chunks, "chunk_tokens": self.chunk_tokens,
            "warm_share": self.warm_share,
        }  # fmt: skip
        return WordsShape(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    def prepare(
        self, labels: Sequence[str], n_prompts: int, max_tokens: int, folder: Path
    ) -> Prepared:
        """Make the prompts, ``n_prompts`` a label, and write the model to ``folder`` if it is new.

        max_tokens: of an answer, which the context window must hold beside a prompt.
        """
        if self.shape is None:
            prompts = self._of_questions(labels, n_prompts)
            return Prepared(name=self.name, served=self.name, prompts=prompts)
        words = self.words
        model = shapes.build(
            self.shape, layers=self.layers, dtype=self.dtype, device=self.device, seed=self.seed,
            window=max_tokens + (words.n_tokens if words else 0),
        )  # fmt: skip
        served = BUILTIN
        if self.shape != shapes.BUILTIN:
            model, served = shapes.save(model, folder), str(folder)
        if words is None:
            prompts = self._of_questions(labels, n_prompts)
        else:
            prompts = load_prompts.of_words(
                shapes.Words(model, self.seed), words, labels, n_prompts, chat=self.chat,
                seed=self.seed,
            )  # fmt: skip
        return Prepared(name=model.name, served=served, prompts=prompts)

    def _of_questions(self, labels: Sequence[str], n_prompts: int) -> Prompts:
        named = self.questions or SHORT
        found = load(builtin_set=named) if named in SETS else load([named])
        return load_prompts.of_questions(found, labels, n_prompts, chat=self.chat)
