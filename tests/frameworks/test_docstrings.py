"""The examples in the docstrings of the connectors' public classes run, as they are written."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import langchain_samkv
import llama_index.llms.samkv
import llama_index.postprocessor.samkv
import llama_index.vector_stores.samkv

MODULES = (
    langchain_samkv,
    llama_index.llms.samkv,
    llama_index.postprocessor.samkv,
    llama_index.vector_stores.samkv,
)
CLASSES = [
    getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
]
EXAMPLE = re.compile(r"^(\w+):\n    ```python\n(.*?)^    ```$", re.MULTILINE | re.DOTALL)
STREAMS = {"ChatSamKV", "SamKV", "SamKVLLM"}


def examples(kind: type) -> dict[str, str]:
    """Title of every example of a class -> its code."""
    return {title: textwrap.dedent(code) for title, code in EXAMPLE.findall(inspect.getdoc(kind))}


def test_every_public_class_is_looked_at() -> None:
    assert {kind.__name__ for kind in CLASSES} == {
        "ChatSamKV", "OfflineEmbeddings", "SamKV", "SamKVChroma", "SamKVDocumentCompressor",
        "SamKVDocumentTransformer", "SamKVCacheTransform", "SamKVLLM", "SamKVPostprocessor",
        "SamKVChromaVectorStore",
    }  # fmt: skip


@pytest.mark.usefixtures("databases_of_its_own")
@pytest.mark.parametrize("kind", CLASSES)
async def test_examples_run(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in one namespace, ``await`` as in a notebook."""
    titles = ["Instantiate", "Use", *(["Stream"] if kind.__name__ in STREAMS else []), "Async"]
    found = examples(kind)
    assert list(found) == titles
    assert inspect.getdoc(kind).count("```python") == len(titles)  # none that `EXAMPLE` overlooks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    for title, code in found.items():
        program = compile(code, f"{kind.__name__}, {title}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(program, namespace)) is not None:
            await running
    assert namespace[kind.__name__] is kind
    printed = capsys.readouterr().out
    assert printed.strip() or "print(" not in "".join(found.values())
    if kind.__name__ in STREAMS | {"SamKVChroma", "SamKVChromaVectorStore"}:
        assert "Flevport" in printed, "the answer is in the document"
