"""Retrieval from collections with the embeddings that ``samkv ingest`` gives their records."""

from __future__ import annotations

from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import Records
from samkv_integrations.chroma.results import Retrieved
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.errors import InvalidOption


def nearest(link: ChromaLink, question: str, k: int) -> list[Retrieved]:
    """The ``k`` records that share most words with a question, nearest first.

    Raises EmptyInput or InvalidOption as `ChromaLink.query` does: the collection may have been
    filled with embeddings of another kind.
    """
    (embedding,) = HashingEmbedding().embed([question])
    try:
        return link.query(embedding, k)
    except InvalidOption:
        n_dims = Records(link.collection).dimension()
        if n_dims in (None, len(embedding)):
            raise
        raise InvalidOption(
            f"collection {link.collection.name!r} holds embeddings of dimension {n_dims}, and "
            f"'samkv ingest' makes {len(embedding)}; ask a collection that 'samkv ingest' has "
            "filled, or retrieve with the model that made them and give its texts in a prompt"
        ) from None
