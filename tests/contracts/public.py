"""What users see, as data: names, signatures, fields, errors, rows of commands, bodies of HTTP.

    python -m tests.contracts.public > tests/contracts/public.json   # after a wanted change

Only public names are imported, so that everything behind them may move.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

MODULES = (
    "samkv_integrations",
    "langchain_samkv",
    "llama_index.llms.samkv",
    "llama_index.postprocessor.samkv",
    "llama_index.vector_stores.samkv",
)
STORE = {"key", "keys", "delete", "stats", "set_budget", "text", "namespace"}
"""What users call of a store; the rest is between it and the engine."""
INNER = {
    **dict.fromkeys(("ChunkStore", "MemoryStore"), lambda name: name not in STORE),
    "Engine": lambda name: name in ("render", "request", "resolve"),
    "AnswerStream": lambda name: name == "call",
}
"""Class -> which of its names are public in Python and not meant for users."""


def signature(function: Any) -> str:  # noqa: ANN401
    """Names, kinds and defaults of the arguments; types are the type checker's."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def is_ours(cls: type) -> bool:
    return "samkv" in cls.__module__


def described(value: Any) -> Any:  # noqa: ANN401
    """A class with what it adds to a framework's, the keys of a mapping, or a signature."""
    if isinstance(value, Mapping):
        return sorted(value)
    if not inspect.isclass(value):
        return signature(value)
    is_inner = INNER.get(value.__name__, lambda name: False)
    members = {}
    for cls in filter(is_ours, value.__mro__):
        for name in vars(cls):
            if name.startswith(("_", "model_")) or is_inner(name):
                continue
            reached = getattr(value, name, None)
            is_function = inspect.isfunction(reached) or inspect.ismethod(reached)
            members[name] = signature(reached) if is_function else "attribute"
    found: dict[str, Any] = {"members": members}
    if issubclass(value, BaseException):
        found["bases"] = [base.__name__ for base in value.__mro__[1:-1]]
    if is_dataclass(value):
        found["fields"] = [field.name for field in fields(value)]
    if known := getattr(value, "model_fields", None):
        of_others: set[str] = set()
        for cls in value.__mro__:
            of_others |= set() if is_ours(cls) else set(getattr(cls, "model_fields", ()))
        found["fields"] = {
            name: repr(field.default) for name, field in known.items() if name not in of_others
        }
    elif "__init__" in vars(value) and not is_inner("call"):
        found["call"] = signature(value)
    return found


def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in MODULES:
        loaded = import_module(module)
        found[module] = {name: described(getattr(loaded, name)) for name in loaded.__all__}
    errors = import_module("samkv_integrations.errors")
    found["samkv_integrations.errors"] = {
        name: [base.__name__ for base in value.__mro__[1:-1]]
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.SamkvError)
    }
    engine = import_module("samkv_integrations").Engine
    for function in (engine.from_pretrained, engine.generate):
        options = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
        known = getattr(sys.modules[function.__module__], options)
        found[f"options of {function.__name__}"] = sorted(known.__annotations__)
    return found


def rows_of_commands() -> dict[str, list[str]]:
    """Command -> names of what ``--json`` writes for each row."""
    app = import_module("samkv_integrations.cli.app").app
    found = {}
    with TemporaryDirectory() as root:
        documents, index = Path(root) / "documents", ["--dir", f"{root}/index"]
        documents.mkdir()
        (documents / "a.txt").write_text("Lena Harman works in Zenoburg.\n" * 8)
        for command in (
            ["methods"], ["ingest", str(documents), *index], ["ask", "Where?", *index],
            ["store", "stats", *index],
            ["inspect", "Where?", *index], ["remove", str(documents), *index],
        ):  # fmt: skip
            result = CliRunner().invoke(app, [*command, "--json"])
            assert result.exit_code == 0, (command, result.output, result.exception)
            rows = json.loads(result.stdout)["rows"]
            found[" ".join(command[: 1 + (command[0] == "store")])] = sorted(rows[0])
    return found


def http() -> dict[str, Any]:
    """Routes, and the fields of every body."""
    from tests.support.served_town import Town  # noqa: PLC0415

    with TemporaryDirectory() as root:
        document = Town(Path(root)).asgi.openapi()
    return {
        "routes": sorted(f"{m} {path}" for path, found in document["paths"].items() for m in found),
        "bodies": {
            name: sorted(schema.get("properties", ()))
            for name, schema in document["components"]["schemas"].items()
        },
    }


def public() -> dict[str, Any]:
    return {"names": names(), "rows": rows_of_commands(), "http": http()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(public(), indent=1, sort_keys=True) + "\n")
