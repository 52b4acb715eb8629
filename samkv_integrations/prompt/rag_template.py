"""Checks of texts that callers give, and the RAG prompt of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.option import check_text
from samkv_integrations.store.chunk import normalise

_CHAT_TEMPLATE = "Documents:\n\n{context}\n\nQuestion: {question}"
_RAG_TEMPLATE = f"{_CHAT_TEMPLATE}\nAnswer:"


def bodies_of(texts: Sequence[str]) -> list[str]:
    """The normalised texts of chunks; raises as `check_texts`."""
    return [normalise(text) for text in check_texts("chunks", texts)]


def check_texts(what: str, texts: Iterable[str]) -> list[str]:
    """The texts as a list. Raises InvalidOption for anything else, such as a single string.

    what: the name of the argument.
    """
    if isinstance(texts, str):
        raise InvalidOption(f"one text was given for {what} ({texts[:40]!r}); put it into a list")
    if not isinstance(texts, Iterable):
        raise InvalidOption(Given(what, texts), "; it must be a list of strings")
    found = list(texts)
    for text in found:
        if not isinstance(text, str):
            raise InvalidOption(f"{what} holds {text!r}; each item must be a string")
    return found


def shorten(text: str) -> str:
    """At most 60 characters of ``text``, for a message."""
    return text if len(text) <= 60 else text[:59] + "…"


def rag_prompt(
    question: str, documents: Sequence[str], *, chat: bool = False
) -> str | list[dict[str, str]]:
    """The prompt of the command line and the benchmarks.

    documents: texts or handles of chunks. chat: one user message for a chat template; it ends with
    the question, as the answer is the assistant's turn.

    Raises InvalidOption if the arguments are not strings, or ``documents`` is a single string.
    """
    check_text("question", question)
    context = "\n\n".join(check_texts("documents", documents))
    if chat:
        content = _CHAT_TEMPLATE.format(context=context, question=question)
        return [{"role": "user", "content": content}]
    return _RAG_TEMPLATE.format(context=context, question=question)
