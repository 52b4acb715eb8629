"""Embeddings of texts: hashed words, and learned ones, which a collection remembers."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.errors import (
    EmbeddingFailed,
    Given,
    InvalidOption,
    MissingExtra,
    ModelNotFound,
    UnknownOption,
)

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

    from samkv_integrations.chroma.client import Database

N_FEATURES = 1024

CHROMA = "chroma"
"""The name of Chroma's default embedding function."""

MODEL_FIELD, URL_FIELD = "samkv_embedding", "samkv_embedding_url"
"""The fields of a collection's metadata that name its embedding."""

KEY_VARIABLE, BASE_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"

TIMEOUT_S = 120.0
"""Most seconds that an endpoint may be silent: it may load its model first."""

_REQUEST = 64
"""Most texts of one request to an endpoint."""

_MOST_BYTES = 32 * 2**20
"""Most bytes of a response of an endpoint: 20,000 numbers for each text."""

RANK_CONSTANT = 60
"""The constant of `fused`, with which the paper's authors ran all their experiments."""

_WORDS = re.compile(r"\b\w\w+\b")


class HashingEmbedding:
    """Lexical embeddings, computed offline without a model: hashed words and pairs of words.

    Texts are near when they share words. Good enough for tests, demonstrations and questions that
    name what they ask about; paraphrases need a learned embedding. The vectors are those of
    scikit-learn's HashingVectorizer, whose import takes a second.
    """

    def __init__(self) -> None:
        try:
            from mmh3 import hash as murmur
        except ImportError as error:
            raise MissingExtra.of("mmh3", "chroma") from error
        self._hash = murmur

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        words = _WORDS.findall(text.lower())
        vector = [0.0] * N_FEATURES
        for feature, count in Counter([*words, *map(" ".join, pairwise(words))]).items():
            hashed = self._hash(feature, 0, True)  # of either sign, so that collisions cancel out
            vector[abs(hashed) % N_FEATURES] += count if hashed >= 0 else -count
        length = math.sqrt(sum(number * number for number in vector))
        # zeros share one object, which is most of the memory
        return [number / length if number else 0.0 for number in vector] if length else vector


class Embedding(Protocol):
    """Texts to vectors that are near if the texts mean the same. Thread-safe."""

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, all of one dimension."""
        ...

    def embed_question(self, question: str) -> list[float]:
        """The vector of a question, near those of texts that answer it."""
        ...


@dataclass(frozen=True, kw_only=True)
class EmbeddingName:
    """Which learned embedding a collection has.

    model: ``chroma``, the id of a sentence-transformers model or the absolute path of its folder;
    with ``url``, the name of the endpoint's model. url: of an OpenAI-compatible endpoint,
    ``http://HOST:PORT/v1``.
    """

    model: str
    url: str | None = None

    def __str__(self) -> str:
        return f"{self.model!r} at {self.url}" if self.url else repr(self.model)

    @classmethod
    def given(cls, model: str, url: str | None) -> EmbeddingName:
        """The embedding that a user names.

        Raises ModelNotFound for a path that does not exist, InvalidOption for a wrong URL.
        """
        if url is not None:
            return cls(model=model, url=checked_url(url))
        if model not in ("", CHROMA) and Path(model).is_dir():
            return cls(model=str(Path(model).resolve()))
        if not model or model.startswith((".", "/", "~")):
            raise ModelNotFound(f"embedding {model!r} is not a folder; {_KNOWN}")
        return cls(model=model)

    @classmethod
    def of(cls, collection: Collection) -> EmbeddingName | None:
        """The one that a collection remembers; None for a collection without one."""
        known = collection.metadata or {}
        if not (model := known.get(MODEL_FIELD)):
            return None
        url = known.get(URL_FIELD)
        return cls(model=str(model), url=str(url) if url else None)

    @property
    def fields(self) -> dict[str, str]:
        """Its fields in a collection's metadata."""
        of_url = {URL_FIELD: self.url} if self.url else {}
        return {MODEL_FIELD: self.model, **of_url}


_KNOWN = (
    "give 'chroma', a sentence-transformers id, a folder of one, or with --embedding-url the model "
    "of an endpoint"
)


def checked_url(url: str) -> str:
    """The URL of an endpoint, without a slash at its end.

    Raises InvalidOption for another form, and for one with a user or a password, which would be
    stored.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        has_more = "@" in parts.netloc or parts.query or parts.fragment or parts.port == 0
        if parts.scheme in ("http", "https") and parts.hostname and not has_more:
            return url.rstrip("/")
    place = url.rpartition("@")[2]  # shows no password
    raise InvalidOption(
        f"endpoint {place!r}; give http://HOST:PORT/v1 without user, password and query (a key is "
        f"read from the variable {KEY_VARIABLE})"
    )


_Model = Callable[[Sequence[str], bool], Any]
"""Texts, and whether they are questions, to rows of numbers."""


class LearnedEmbedding:
    """Vectors of length 1 by a learned model, which is loaded at the first use. Thread-safe.

    The methods raise MissingExtra if a package is not installed, ModelNotFound if the model cannot
    be loaded, EmbeddingFailed if it or its endpoint fails.

    Args:
        name: of the model.
        key: an endpoint's API key, which no message shows.
    """

    def __init__(self, name: EmbeddingName, key: str | None = None) -> None:
        self.name, self._key = name, key
        self._model: _Model | None = None
        self._loading = Lock()

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, is_question=False) if texts else []

    def embed_question(self, question: str) -> list[float]:
        return self._embed([question], is_question=True)[0]

    def _embed(self, texts: Sequence[str], *, is_question: bool) -> list[list[float]]:
        with self._loading:
            if self._model is None:
                self._model = self._load()
        # no tokenizer takes half of a surrogate pair
        whole = [text.encode(errors="replace").decode() for text in texts]
        found = self._model(whole, is_question)
        try:
            with np.errstate(over="ignore"):  # infinite ones are refused below
                rows = np.asarray(found, np.float32)
        except (TypeError, ValueError):  # of several dimensions, or no numbers
            rows = np.empty(0, np.float32)
        if (
            rows.ndim != 2
            or len(rows) != len(texts)
            or not rows.size
            or not np.isfinite(rows).all()
        ):
            raise EmbeddingFailed(
                f"embedding {self.name} gave no vector of numbers for each of {len(texts)} texts; "
                "is it a model of embeddings?"
            )
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit: list[list[float]] = (rows / np.where(lengths, lengths, 1)).tolist()
        return unit

    def _load(self) -> _Model:
        if self.name.url is not None:
            return _endpoint(self.name.model, self.name.url, self._key)
        return _of_chroma() if self.name.model == CHROMA else _sentence_transformer(self.name.model)


def _of_chroma() -> _Model:
    """all-MiniLM-L6-v2, which reads the first 256 tokens of a text."""
    # onnxruntime reads it when it is imported; its function for this comes too late
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    MissingExtra.unless_installed("chroma", "onnxruntime", "tokenizers")
    from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

    function, lock = ONNXMiniLM_L6_V2(), Lock()

    def embed(texts: Sequence[str], is_question: bool) -> Any:  # noqa: ANN401
        with lock:
            return function(list(texts))

    try:
        embed(["a text"], False)
    except Exception as error:  # of the download, or of the files
        raise ModelNotFound(
            f"Chroma's embedding cannot be loaded: {_first_line(error)}; it is downloaded once, "
            f"into {function.DOWNLOAD_PATH}: connect this machine, or copy that folder from one "
            "that has it"
        ) from error
    return embed


def _sentence_transformer(model: str) -> _Model:
    MissingExtra.unless_installed("embedding", "sentence_transformers")
    if os.path.isabs(model) and not os.path.isdir(model):
        raise ModelNotFound(
            f"the folder {model} of the collection's embedding is not here; put it there, or "
            "ingest into another collection with one that is"
        )
    from sentence_transformers import SentenceTransformer

    from samkv_integrations.runtimes.transformers.loading import hub_answers

    try:  # without the hub it would try again for a minute
        is_here = Path(model).is_dir() or not hub_answers()
        loaded = SentenceTransformer(model, local_files_only=is_here)
    except Exception as error:  # of the hub, of files, or of their content
        raise ModelNotFound(
            f"embedding {model!r} cannot be loaded: {_first_line(error)}; {_KNOWN}"
        ) from error
    lock = Lock()

    def embed(texts: Sequence[str], is_question: bool) -> Any:  # noqa: ANN401
        encode = loaded.encode_query if is_question else loaded.encode_document
        with lock:  # tokenizers are not thread-safe
            return encode(list(texts), show_progress_bar=False)

    return embed


def _endpoint(model: str, url: str, key: str | None) -> _Model:
    """The route ``/embeddings`` of OpenAI's API."""
    import httpx

    # uncompressed: a small response could unpack to more than the memory
    headers = {"accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    client = httpx.Client(timeout=TIMEOUT_S, headers=headers)  # follows no redirect

    def embed(texts: Sequence[str], is_question: bool) -> list[Any]:
        starts = range(0, len(texts), _REQUEST)
        return [row for start in starts for row in ask(texts[start : start + _REQUEST])]

    def ask(texts: Sequence[str]) -> list[Any]:
        asked, content = {"model": model, "input": texts}, bytearray()
        try:
            with client.stream("POST", f"{url}/embeddings", json=asked) as response:
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > _MOST_BYTES:
                        raise EmbeddingFailed(
                            f"{url}/embeddings returned more than {_MOST_BYTES} bytes for "
                            f"{len(texts)} texts; is {model!r} a model of embeddings?"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EmbeddingFailed(
                f"the endpoint of embeddings {url} does not answer ({_first_line(error)}); start "
                "it, or give its address with --embedding-url"
            ) from error
        if not response.is_success:
            said = content.decode(errors="replace")
            said = said.replace(key, "...") if key else said
            raise EmbeddingFailed(
                f"the endpoint of embeddings {url} refused model {model!r} with status "
                f"{response.status_code}: {' '.join(said.split())[:200]}; {_next(response, key)}"
            )
        try:
            data = sorted(json.loads(content)["data"], key=lambda row: row.get("index", 0))
            return [row["embedding"] for row in data]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EmbeddingFailed(
                f"{url}/embeddings returned something else than OpenAI's embeddings; give the URL "
                "of an OpenAI-compatible endpoint, such as http://HOST:PORT/v1"
            ) from error

    return embed


def _next(response: Any, key: str | None) -> str:  # noqa: ANN401
    """The next step after a response with an error."""
    if response.status_code in (401, 403):
        if key:
            return f"set {KEY_VARIABLE} to a key that it accepts"
        return (
            f"set {KEY_VARIABLE}, which is sent to a URL that --embedding-url or {BASE_VARIABLE} "
            "gives, and to no other"
        )
    if response.status_code == 404:
        return "give the name of one of its models, and a URL that ends as its API does, in /v1"
    if response.status_code == 429:
        return "try again later"
    return "see its log"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class Embeddings:
    """The embeddings of collections, each loaded once. Thread-safe.

    Args:
        model: as the user names it; None for the one that a collection remembers.
        url: of the endpoint, if it has moved, or is that of ``model``.

    Raises as `EmbeddingName.given` does.
    """

    def __init__(self, model: str | None = None, url: str | None = None) -> None:
        self._url = None if url is None else checked_url(url)
        self._given = None if model is None else EmbeddingName.given(model, url)
        self._loaded: dict[EmbeddingName, LearnedEmbedding] = {}
        self._lock = Lock()

    def of(self, collection: Collection) -> LearnedEmbedding | None:
        """That of a collection; None for one without an embedding.

        Raises InvalidOption if the user has named another one.
        """
        known = EmbeddingName.of(collection)
        if self._given is not None and not self._is_same(known):
            raise InvalidOption(
                Given("embedding", self._given.model),
                f"; collection {collection.name!r} was ingested {_by(known)}; leave it out, or "
                "ingest with it into another collection",
            )
        if self._url is not None and (known is None or known.url is None):
            raise InvalidOption(
                Given("embedding_url", self._url),
                f"; collection {collection.name!r} was ingested {_by(known)}, which has no "
                "endpoint; leave it out",
            )
        return None if known is None else self._get(replace(known, url=self._url or known.url))

    def to_ingest(self, database: Database, collection: str) -> LearnedEmbedding | None:
        """The embedding for documents of a collection, which may not exist; it has been tried.

        Raises InvalidOption if the collection has records by another one.
        """
        opened = None
        with suppress(InvalidOption, UnknownOption):  # no database, or no such collection
            opened = database.collection(collection)
        known = EmbeddingName.of(opened) if opened else None
        if self._given is None and self._url is not None and (known is None or known.url is None):
            raise InvalidOption(
                Given("embedding_url", self._url),
                " without the name of its model; give it with --embedding",
            )
        if self._given is None and known is None:
            return None
        if opened and not self._is_same(known) and _has_records(opened):
            raise InvalidOption(
                Given("embedding", self._given and self._given.model),
                f"; collection {collection!r} was ingested {_by(known)}; give another --collection "
                "(chunk caches of the same texts are used again), or delete these records with "
                "'samkv remove' first",
            )
        name = self._given or known
        if known is not None and self._is_same(known):
            name = replace(known, url=self._url or known.url)
        assert name is not None
        embedding = self._get(name)
        embedding.embed(["a text"])  # fails before anything slow
        return embedding

    def _is_same(self, known: EmbeddingName | None) -> bool:
        """Whether the given model, if there is one, is that which a collection remembers."""
        given = self._given
        if given is None or known is None:
            return given is None
        return given.model == known.model and (given.url is None or known.url is not None)

    def _get(self, name: EmbeddingName) -> LearnedEmbedding:
        trusted = self._url, os.environ.get(BASE_VARIABLE, OPENAI).rstrip("/")
        key = os.environ.get(KEY_VARIABLE, "").strip() if name.url in trusted else None
        if key and not (key.isascii() and key.isprintable()):  # the client's error would show it
            raise InvalidOption(
                f"{KEY_VARIABLE} is not a key: it has characters other than visible ASCII; set it "
                "to the endpoint's key"
            )
        with self._lock:
            return self._loaded.setdefault(name, LearnedEmbedding(name, key))


def _has_records(collection: Collection) -> bool:
    with chroma_errors(f"collection {collection.name!r} cannot be read"):
        return bool(collection.count())


def _by(known: EmbeddingName | None) -> str:
    return f"with embedding {known}" if known else "without an embedding"


def open_remembering(
    database: Database, collection: str, embedding: LearnedEmbedding | None
) -> Collection:
    """The collection, made if it is missing, which remembers its embedding from now on."""
    opened = database.collection(collection, create=True)
    if embedding is None or EmbeddingName.of(opened) == embedding.name:
        return opened
    return database.describe(opened, embedding.name.fields)


def fused(*rankings: Sequence[str]) -> dict[str, float]:
    """Reciprocal rank fusion of rankings: id -> score, the best first.

    An id's score is the sum of 1 / (60 + its rank) over the rankings that have it (Cormack, Clarke
    and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning
    Methods", SIGIR 2009). Ranks count from 1. Of equal scores the first ranking's id comes first.
    """
    scores = dict[str, float]()
    for ranking in rankings:
        for rank, id_ in enumerate(ranking, start=1):
            scores[id_] = scores.get(id_, 0.0) + 1 / (RANK_CONSTANT + rank)
    return dict(sorted(scores.items(), key=lambda scored: -scored[1]))
