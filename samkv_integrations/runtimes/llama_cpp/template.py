"""Writes chats with the template of a GGUF file, as transformers does.

Templates come with files that anyone may have made, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from samkv_integrations.errors import MissingExtra

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment


def write_chat(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
    names: Mapping[str, str], *, opens: bool,
) -> str:  # fmt: skip
    """What a template writes; it may raise whatever its author chose.

    names: special tokens by their roles, such as ``bos_token``. opens: see `ModelText.write_chat`.

    Raises MissingExtra without jinja2, and ValueError without messages.
    """
    if not messages:
        raise ValueError("a chat needs a message")
    # templates test whether a key is there, and not whether its value is None
    given = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    return _compiled(template).render(
        messages=given, tools=list(tools) or None, documents=None, add_generation_prompt=opens,
        **names,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of transformers may use beside jinja2's own."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError as error:
        raise MissingExtra.of("jinja2", "llama-cpp") from error

    class Generation(Extension):
        """The tag around answers, for programs that train on them; here it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_written")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _written(self, caller: Macro) -> str:
            return caller()

    class OwnNamespace(Namespace):
        """A namespace that holds no name by which Python finds its own methods."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` may be a name of a template
            names = dict(*args[1:], **kwargs)
            for name in names:
                refuse_own(name)
            Namespace.__init__(args[0], names)

        def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
            refuse_own(name)
            super().__setitem__(name, value)

    def refuse_own(name: object) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"a namespace of a chat template must not hold {name!r}")

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: int | None = None,  # noqa: ANN401
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        """As it is: jinja2's own filter escapes signs of HTML."""
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=OwnNamespace
    )
    return environment
