"""How templates, encoders and people write the text of a chunk into a prompt."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Callable
from functools import partial

import markupsafe
from jinja2.utils import htmlsafe_json_dumps

WRITERS: dict[str, Callable[[str], str]] = {
    "json": json.dumps,
    "json, not ascii": partial(json.dumps, ensure_ascii=False),
    "tojson": lambda text: str(htmlsafe_json_dumps(text)),
    "repr": repr,
    "repr with both quotes": lambda text: repr(f"'\"{text}"),
    "html": html.escape,
    "html without quotes": partial(html.escape, quote=False),
    "jinja": lambda text: str(markupsafe.escape(text)),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "indented": lambda text: textwrap.indent(text, "    "),
    "on one line": lambda text: " ".join(text.split()),
    "json in json": lambda text: json.dumps(json.dumps([text])),
    "indented, in json": lambda text: json.dumps({"text": textwrap.indent(text, "\t")}, indent=2),
    "json in html": lambda text: html.escape(json.dumps(text)),
}
