"""What importing a connector brings in: no engine. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "langchain_samkv",
    "llama_index.llms.samkv",
    "llama_index.llms.samkv.quickstart",
    "llama_index.postprocessor.samkv",
    "llama_index.vector_stores.samkv",
)
OF_ENGINES = {"torch", "transformers", "tokenizers", "safetensors", "sklearn"}

IMPORT = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sys.modules)
"""
WITHOUT_ENGINE = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
from langchain_samkv import ChatSamKV, SamKVDocumentTransformer
from llama_index.llms.samkv import SamKVLLM
for make in (
    lambda: ChatSamKV(model="builtin"),
    lambda: SamKVLLM(model_name="builtin"),
    lambda: SamKVLLM(model_name="builtin", method="epic", generate_kwargs={"top_k": 4}),
    lambda: SamKVDocumentTransformer(engine=42),
):
    try:
        make()
    except (ImportError, ValueError) as error:
        print(type(error).__name__, error)
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_no_engine_is_imported(module: str) -> None:
    imported = {name.split(".")[0] for name in run(IMPORT, module).split()}
    assert "samkv_integrations" in imported
    assert not imported & OF_ENGINES


def test_an_llm_without_an_engine_names_the_extra() -> None:
    *of_llms, of_another = run(WITHOUT_ENGINE).splitlines()
    assert len(of_llms) == 3
    for line in of_llms:
        assert line.startswith("MissingExtra ") and "pip install '.[transformers]'" in line
    assert of_another.startswith("InvalidOption int has no engine; give an LLM")  # needs none
