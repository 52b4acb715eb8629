"""The prompt that the command line and the benchmarks ask with."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.prompt.text import check_text, check_texts

_CHAT_TEMPLATE = "Documents:\n\n{context}\n\nQuestion: {question}"
_RAG_TEMPLATE = f"{_CHAT_TEMPLATE}\nAnswer:"


def rag_prompt(
    question: str, documents: Sequence[str], *, chat: bool = False
) -> str | list[dict[str, str]]:
    """The prompt that the command line and the benchmarks ask with.

    documents: bodies or handles of chunks. chat: as one user message, for a chat template; it ends
    with the question, because there the answer is the assistant's turn.

    Raises InvalidOption for what are no texts, and for one text in place of a list.
    """
    check_text("question", question)
    context = "\n\n".join(check_texts("documents", documents))
    if chat:
        content = _CHAT_TEMPLATE.format(context=context, question=question)
        return [{"role": "user", "content": content}]
    return _RAG_TEMPLATE.format(context=context, question=question)
