"""The prefix: the tokens after which chunks are computed."""

from __future__ import annotations

from samkv_integrations.option import PrefixPolicy
from samkv_integrations.prompt.text import ModelText

DOCUMENTS_BEFORE = (
    "[Lake Varen]\nLake Varen is a lake in the north of the country. It is about twelve kilometres "
    "long and is fed by three rivers.\n\n[Anna Holm]\nAnna Holm (born 4 May 1931) was a writer and "
    "teacher. She published nine novels and two collections of poems.\n\n"
)
"""Two made-up documents. A chunk that is prefilled after them has the entries of one document of
several, as in a prompt. They halve what `reuse` loses on short chunks of SmolLM2
(docs/decisions.md)."""


def prefix_ids(model: ModelText, prefix: PrefixPolicy, prefix_text: str) -> tuple[int, ...]:
    """The token ids that an engine's ``prefix`` and ``prefix_text`` stand for.

    A text takes the place of the documents. BOS comes first, unless the model has none or
    ``prefix`` is ``"none"``. ``"auto"`` is ``"documents"``.
    """
    bos = () if prefix == "none" or model.bos_id is None else (model.bos_id,)
    if prefix_text:
        return (*bos, *model.tokenize(prefix_text, special=True))
    if prefix in ("bos", "none"):
        return bos
    return (*bos, *model.tokenize(DOCUMENTS_BEFORE, special=False))
