"""From strings to the token ids of a model and back, and its chat template."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.prompt.layout import n_in_common
from samkv_integrations.prompt.quoting import Chat, RenderedPrompt, SpecialTokens

_USES_TOOLS = re.compile(r"\{[{%][^{}]*\btools\b")


class ModelText(ABC):
    """The text that a model reads and writes.

    A subclass wraps a tokenizer; this class has all that follows from it.

    name: what a report calls the model.
    """

    name: str

    # -- what a tokenizer does ----------------------------------------------------------------

    @abstractmethod
    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of ``text`` alone, nothing added.

        special: whether ``<|names|>`` of special tokens in the text count as such. True for a
        rendered chat template; False for a chunk, whose words must not steer the conversation.

        Raises InvalidOption for half a character (a lone surrogate).
        """

    @abstractmethod
    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text in which no special token counts, and the characters of each."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""

    @property
    @abstractmethod
    def n_vocabulary(self) -> int:
        """Number of token ids, which begin at 0."""

    @property
    def wider_window(self) -> str:
        """The suffix ``, or ...`` of an error: how to load the model with a longer window."""
        return ""

    @property
    @abstractmethod
    def longest_token(self) -> int:
        """Characters of the longest token, which give a lower bound of a text's tokens."""

    @property
    @abstractmethod
    def special_tokens(self) -> SpecialTokens:
        """The special tokens by name."""

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """The token that begins a text; None without one."""

    @property
    @abstractmethod
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""

    @property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Token ids that the tokenizer adds before and after a text without a chat template."""
        return ([] if self.bos_id is None else [self.bos_id]), []

    @property
    def fast_tokenizer(self) -> Any | None:  # noqa: ANN401
        """The tokenizer as an object of the library tokenizers, which is faster; None without."""
        return None

    # -- the chat template --------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None without one."""
        return None

    @property
    def chat_template_of_tools(self) -> str | None:
        """The source of the template that writes prompts with tools; often the same one."""
        return self.chat_template

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        opens: bool = True,
    ) -> str:  # fmt: skip
        """What the chat template writes; it may raise whatever its author chose.

        opens: whether it ends with the opening of an answer.
        """
        raise NotImplementedError

    # -- what follows -------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @property
    def asks_in_chat(self) -> bool:
        """Whether questions go through the chat template by default.

        Not with the built-in model, which reads plain prompts as well.
        """
        return self.has_chat_template and self.name != "builtin"

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template of prompts with tools; None if there is none that writes them."""
        template = self.chat_template_of_tools or ""
        return template if _USES_TOOLS.search(template) else None

    def tokenize_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a whole prompt, as the model's own tokenizer makes them.

        A text that no chat template wrote gets `added_ids`, BOS only if it does not begin with it.
        """
        ids: list[int] = []
        for text, counts in self.special_tokens.stretches(prompt):
            ids += self.tokenize(text, special=counts)
        if prompt.is_chat:
            return ids
        before, after = self.added_ids
        return [*(() if ids[:1] == before[:1] else before), *ids, *after]

    def end_ids(self, more: Iterable[int]) -> frozenset[int]:
        """`eos_ids` and ``more``. Raises InvalidOption if one of ``more`` is not a token."""
        if isinstance(more, str) or not isinstance(more, Iterable):
            raise InvalidOption(Given("stop_ids", more), "; it must be a list of token ids")
        ids, size = list(more), self.n_vocabulary
        for found in ids:
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < size:
                raise InvalidOption(
                    f"stop id {found!r}; it must be a token id of {self.name!r}, 0 to {size - 1}. "
                    "tokenizer.convert_tokens_to_ids gives the id of a token"
                )
        return self.eos_ids | frozenset(ids)

    def render_chat(self, messages: Sequence[dict[str, str]] | Chat) -> RenderedPrompt:
        """The prompt of ``messages`` (``role``, ``content``), ready for an answer.

        Names of special tokens in their contents are text, and control nothing.

        Raises InvalidOption if there is no chat template, or if it refuses the messages.
        """
        chat = messages if isinstance(messages, Chat) else Chat(messages)
        if not self.has_chat_template:
            raise InvalidOption(
                f"{self.name!r} has no chat template; pass a plain prompt string instead"
            )
        needs_tools = bool(chat.tools)
        for message in chat.messages:
            needs_tools |= message["role"] == "tool" or bool(message.get("tool_calls"))
        if needs_tools and self.tool_template is None:
            raise InvalidOption(
                Given("messages", ...),
                f": the chat template of {self.name!r} takes no tools and no calls of tools; leave "
                "them out of the messages",
            )

        def render(contents: Any) -> str:  # noqa: ANN401
            written, tools = contents
            try:
                return self.write_chat(written, tools)
            except Exception as error:
                raise InvalidOption(
                    f"the chat template of {self.name!r} refused: {error}"
                ) from error

        written = self.special_tokens.rendered([list(chat.messages), list(chat.tools)], render)
        return replace(written, is_chat=True)

    @cached_property
    def answer_opening(self) -> tuple[int, ...]:
        """The last token ids of a chat prompt, which a later prompt of the chat may lack.

        After the messages, a template writes an opening for the answer. Parts of it, such as empty
        thoughts, it may leave out before the answers of earlier turns. What it writes before those,
        too, does not count, except its last token, which may merge with the answer.
        """
        message = [{"role": "user", "content": "a"}]
        answered = [*message, {"role": "assistant", "content": "b"}]
        try:
            with_it, without = (self.write_chat(message, opens=opens) for opens in (True, False))
            later = self.write_chat(answered, opens=False)
        except Exception:  # also without a template
            return ()
        opening = with_it.removeprefix(without)
        if opening == with_it:
            return ()
        ids = self.tokenize(opening, special=True)
        in_history = self.tokenize(later.removeprefix(without), special=True)
        n_same = n_in_common(np.array(ids), np.array(in_history))
        return tuple(ids[max(0, n_same - 1) :])


def half_character(text: str) -> InvalidOption:
    """The error for a text with half a character (a lone surrogate), which no tokenizer takes."""
    half = re.search("[^<>]{,20}[\ud800-\udfff][^<>]{,20}", text)
    return InvalidOption(
        f"a text holds half a character (a lone surrogate) in {half and half[0]!r}; "
        "clean it with text.encode(errors='replace').decode()"
    )


class TextStream:
    """Turns tokens into pieces of text, up to a stop string, which is not part of the text.

    Text is held back while it ends in half a character, or may begin a stop string.
    """

    def __init__(self, model: ModelText, stop: Sequence[str] = ()) -> None:
        self._model = model
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is final after ``token``; may be empty."""
        self._ids.append(token)
        text = self._model.detokenize(self._ids)
        end = len(text)
        for stop in self._stop:
            if (at := text.find(stop, max(0, self._sent - len(stop)))) >= 0:
                self.stopped, end = True, min(end, at)
        if not self.stopped:
            end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            tail = text[self._sent : end]  # after what was sent, which stays
            held_back = 0
            for stop in self._stop:
                begun = min(len(stop) - 1, len(tail))
                while not tail.endswith(stop[:begun]):
                    begun -= 1
                held_back = max(held_back, begun)
            end -= held_back
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def flush(self) -> str:
        """The text that was held back, after the last token."""
        return "" if self.stopped else self._model.detokenize(self._ids)[self._sent :]
