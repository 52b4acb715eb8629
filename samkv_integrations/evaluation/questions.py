"""Questions with their documents, and the prompts that they are asked in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from samkv_integrations.documents import read_text
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.measures import f1_words
from samkv_integrations.model.model import Model
from samkv_integrations.model.quoting import RenderedPrompt
from samkv_integrations.prompt.rag_template import rag_prompt

ANSWER_TOKENS = 16
"""Longest answer to a question that does not give its own limit."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the documents that the model is given.

    answers: the right answers; empty if they are not known.
    documents: texts of the chunks, in order; empty if they are retrieved later.
    """

    question: str
    id: str = "1"
    answers: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    max_new_tokens: int = ANSWER_TOKENS

    @property
    def has_gold(self) -> bool:
        """Whether answers can be judged. A gold answer needs a word that is not an article."""
        return any(f1_words(answer) for answer in self.answers)

    def prompt(self, *, chat: bool = False) -> str | list[dict[str, str]]:
        """The whole prompt. chat: as one user message, for a chat template."""
        return rag_prompt(self.question, self.documents, chat=chat)

    def prompt_ids(self, model: Model, *, chat: bool = False) -> list[int]:
        """Token ids of the prompt, as transformers tokenizes it."""
        prompt = self.prompt(chat=chat)
        rendered = RenderedPrompt(prompt) if isinstance(prompt, str) else model.render_chat(prompt)
        return model.tokenize_prompt(rendered)


def question_of(text: str) -> Question:
    """The question given on the command line. Raises EmptyInput if it is blank."""
    if not text.strip():
        raise EmptyInput("the question is empty; say what to ask, or give --questions FILE")
    return Question(question=text)


def read_questions(path: Path, *, with_documents: bool = False) -> list[Question]:
    """Read a JSON Lines file. Each line has ``question`` and optionally ``answers``, a list.

    with_documents: whether to read ``documents`` too, a list of chunk texts, where a line has it.

    Raises:
        InvalidOption: the file is missing, or a line is not such an object.
        EmptyInput: the file has no question.
    """
    questions = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is no JSON object")
            question, answers = row.get("question"), row.get("answers", [])
            if (
                not isinstance(question, str)
                or not isinstance(answers, list)
                or any(not isinstance(answer, str | int | float) for answer in answers)
            ):
                raise TypeError("question must be a string and answers a list of texts")
            documents = row.get("documents", []) if with_documents else []
            if not isinstance(documents, list) or any(
                not isinstance(text, str) or not text.strip() for text in documents
            ):
                raise TypeError("documents must be a list of texts, those of cached chunks")
            if not question.strip():
                raise ValueError("the question is empty")
            for text in (question, *documents):
                text.encode()  # JSON allows half a surrogate pair, which is no text
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidOption(
                f"{path}, line {number}: {error}; each line must be a JSON object with "
                "question and, if they are known, answers"
            ) from error
        questions.append(
            Question(
                question=question, id=str(number), answers=tuple(map(str, answers)),
                documents=tuple(documents),
            )
        )  # fmt: skip
    if not questions:
        raise EmptyInput(f"{path} holds no question")
    return questions
