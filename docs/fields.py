"""Docstrings that explain fields line by line, as lists in the API reference.

A docstring of ours says what its fields or arguments are in lines such as ``keys, values: (T, G,
D)``, with what goes on indented below. Markdown would run those lines together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"((?:[a-z]\w*)(?:, [a-z]\w*)*): (?=\S)")
SECTION = re.compile(r"[A-Z][a-z]+:$")
"""The head of a section that the docstring parser knows, ``Args:`` or ``Raises:``."""


class Fields(griffe.Extension):
    """Turns lines that begin with names and a colon into a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:  # noqa: ANN401
        """Rewrite the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(docstring: str) -> str:
    """The docstring with its lines of fields as items; its first line and its sections as is."""
    first, *lines = docstring.split("\n")
    written, is_item = [first], False
    for number, line in enumerate(lines):
        if SECTION.match(line):
            return "\n".join([*written, *lines[number:]])
        if field := FIELD.match(line):
            names = ", ".join(f"`{name}`" for name in field[1].split(", "))
            written += [""] if written[-1] and not is_item else []
            line, is_item = f"- {names}: {line[field.end() :]}", True
        elif is_item and not line.startswith(" "):
            is_item = False
            written += [""] if line else []
        written.append(line)
    return "\n".join(written)
