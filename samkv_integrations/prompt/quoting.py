"""Chats and rendered prompts; names of special tokens in documents are text and control nothing."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as one string.

    quoted: ``[start, stop)`` of each name of a special token that is text here, such as
    ``<|im_end|>`` in a document; in ascending order. All others are control tokens.
    is_chat: whether a chat template wrote it. Then it is complete; else the tokenizer adds the
    tokens that it adds to any text, such as BOS.
    """

    text: str
    quoted: tuple[range, ...] = ()
    is_chat: bool = False

    @classmethod
    def joined(cls, parts: Sequence[RenderedPrompt], *, is_chat: bool) -> RenderedPrompt:
        """One prompt of several parts."""
        text, quoted = "", list[range]()
        for part in parts:
            for span in part.quoted:
                quoted.append(range(len(text) + span.start, len(text) + span.stop))
            text += part.text
        return cls(text, tuple(quoted), is_chat)

    def part(self, start: int, stop: int) -> RenderedPrompt:
        """Characters ``[start, stop)`` of it."""
        first = bisect_right(self.quoted, start, key=lambda span: span.stop)
        last = bisect_left(self.quoted, stop, key=lambda span: span.start)
        quoted = list[range]()
        for span in self.quoted[first:last]:
            quoted.append(range(max(span.start, start) - start, min(span.stop, stop) - start))
        return RenderedPrompt(self.text[start:stop], tuple(quoted), self.is_chat)


class SpecialToken(Protocol):
    """A special token: whether it swallows the space before it and behind it."""

    lstrip: bool
    rstrip: bool


class SpecialTokens:
    """The special tokens of a tokenizer by name, and where their names count in a text."""

    def __init__(self, tokens: Mapping[str, SpecialToken]) -> None:
        self._tokens = dict(tokens)
        longest_first = sorted(self._tokens, key=len, reverse=True)
        # Without a special token nothing matches.
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def quote(self, text: str) -> RenderedPrompt:
        """A text in which no name of a special token counts."""
        return RenderedPrompt(text, tuple(range(*m.span()) for m in self._names.finditer(text)))

    def rendered(self, contents: Any, render: Callable[[Any], str]) -> RenderedPrompt:  # noqa: ANN401
        """What ``render`` makes of ``contents``, whose strings hold no control tokens.

        contents: strings in lists and mappings, nested or not. Before ``render`` gets them, each
        name of a special token is replaced by a private-use character, because names in the output
        could not be told from the template's own. Templates write such a character as it is, or by
        its number in JSON.
        """
        texts = "\uffff".join(_strings(contents))  # no name holds this noncharacter
        names = sorted({*self._names.findall(texts)})
        if not names:
            return RenderedPrompt(render(_replaced(contents, str)))
        used = set(texts) | {chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-f]{4})", texts)}
        private = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        mark_of = dict(zip(names, private, strict=False))
        rendered = render(
            _replaced(contents, lambda text: self._names.sub(lambda m: mark_of[m[0]], text))
        )
        found = {form: name for name, mark in mark_of.items()
                 for form in (mark, f"\\u{ord(mark):04x}")}  # fmt: skip
        text, quoted, at = "", [], 0
        for match in re.finditer("|".join(map(re.escape, found)), rendered):
            text += rendered[at : match.start()]
            name = found[match[0]]
            quoted.append(range(len(text), len(text) + len(name)))
            text += name
            at = match.end()
        return RenderedPrompt(text + rendered[at:], tuple(quoted))

    def stretches(self, prompt: RenderedPrompt) -> list[tuple[str, bool]]:
        """``prompt`` cut into (text, whether control tokens count in it), none of it empty.

        What stands between the control tokens around a quoted name is one stretch, and is
        tokenised as any other text. A control token swallows the space beside it if the
        tokenizer says so.
        """
        text, quoted = prompt.text, prompt.quoted
        if not quoted:
            return [(text, True)] if text else []
        between = zip(
            [0, *(span.stop for span in quoted)],
            [*(span.start for span in quoted), len(text)],
            strict=True,
        )
        control = [m for span in between for m in self._names.finditer(text, *span)]
        edges = [(m.start(), m.end(), self._tokens[m[0]]) for m in control]
        ends = (0, 0, None), (len(text), len(text), None)
        found, at = list[tuple[str, bool]](), 0
        for (_, start, before), (stop, _, after) in pairwise([ends[0], *edges, ends[1]]):
            place = bisect_left(quoted, start, key=lambda span: span.start)
            if place == len(quoted) or quoted[place].start >= stop:  # none is quoted here
                continue
            stretch = text[start:stop]
            if before and before.rstrip:
                stretch = stretch.lstrip()
            if after and after.lstrip:
                stretch = stretch.rstrip()
            found += [(text[at:start], True), (stretch, False)]
            at = stop
        return [(part, counts) for part, counts in [*found, (text[at:], True)] if part]


def _strings(value: Any) -> Iterator[str]:  # noqa: ANN401
    """The strings in lists and mappings, nested or not; keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:  # noqa: ANN401
    """A copy in new lists and dicts, with ``replace`` applied to each string."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return dict(_replaced(list(value.items()), replace))
    if isinstance(value, list | tuple):
        return [_replaced(each, replace) for each in value]
    return value


@dataclass(frozen=True)
class Chat:
    """Messages and tools for a chat template.

    messages: ``role`` and ``content``; the assistant's may have ``tool_calls``, each with ``id``,
        ``type`` and ``function`` (``name``, and ``arguments`` as a dict), and what a tool returned
        has the role ``tool``, its ``name`` and ``tool_call_id``.
    tools: as OpenAI describes them: ``type`` and ``function`` (``name``, ``description``,
        ``parameters`` as a JSON schema).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
