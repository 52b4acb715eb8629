"""An environment without torch, transformers and tokenizers answers from GGUF files, everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.llama_cpp import with_llama_cpp

pytestmark = with_llama_cpp

WITHOUT = """
import sys

ABSENT = ("torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "gguf")

class Without:
    "A finder that finds none of these packages."

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, *rest)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

TEXTS = [
    "The harbour of Ostmere was built in 1874. Its lighthouse is painted green, and boats call.",
    "The town library holds 5120 books; it opens at nine and closes at six on every day.",
]
PROMPT = "\\n\\n".join([*TEXTS, "When was the harbour built?"])
OPTIONS = {"n_ctx": 2048, "n_threads": 1, "method": "reuse"}
"""

IN_PYTHON = """
from samkv_integrations import ChunkStore, Engine
from langchain_samkv import ChatSamKV, OfflineEmbeddings, SamKVChroma
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.llms.samkv import SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.vector_stores.samkv import SamKVChromaVectorStore

engine = Engine.from_pretrained("smollm2", ChunkStore("kv"), **OPTIONS)
engine.cache_chunks(TEXTS)
answer = engine.generate([{"role": "user", "content": PROMPT}], max_new_tokens=4)
assert answer.text and answer.report.reused == 2, answer.report

chat = ChatSamKV(model_path="smollm2", kv_dir="kv2", max_tokens=4, **OPTIONS)
SamKVChroma("texts", OfflineEmbeddings(), persist_directory="chroma", llm=chat).add_texts(TEXTS)
assert chat.invoke(PROMPT).content and chat.last_report.reused == 2, chat.last_report

llm = SamKVLLM(model_path="smollm2", kv_dir="kv3", max_new_tokens=4, **OPTIONS)
store = SamKVChromaVectorStore.from_params("texts", persist_dir="chroma3", llm=llm)
index = VectorStoreIndex.from_documents(
    [Document(text=text) for text in TEXTS],
    StorageContext.from_defaults(vector_store=store), embed_model=OfflineEmbedding(),
)
assert str(index.as_query_engine(llm=llm).query("When was the harbour built?"))
assert llm.last_report.reused == 2, llm.last_report
"""

BY_COMMANDS = """
from pathlib import Path
from typer.testing import CliRunner
from samkv_integrations.cli.app import app

Path("docs").mkdir()
for number, text in enumerate(TEXTS):
    Path(f"docs/{number}.txt").write_text(text)
few = ["--n-threads", "1", "--n-ctx", "2048"]
for command in (
    ["ingest", "docs", "--model", "smollm2", *few],
    ["ask", "When was the harbour built?", "--method", "reuse", "--max-tokens", "4", *few],
    ["doctor", "--model", "smollm2", *few],
):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (command, done.output, done.exception)
    if command[0] == "ask":
        assert "1 of 1 chunks reused" in done.stdout, done.stdout
done = CliRunner().invoke(app, ["doctor"])  # of the built-in model
assert done.exit_code == 2 and "'.[transformers]'" in done.output, done.output
"""

NOTHING = """
ABSENT = (*ABSENT, "xllamacpp", "llama_cpp")
from samkv_integrations import Engine
from samkv_integrations.errors import MissingExtra
from langchain_samkv import ChatSamKV

open("a.gguf", "w").close()
for load, wanted in (
    (lambda: Engine.from_pretrained("a.gguf"), ("transformers", "llama-cpp")),
    (lambda: ChatSamKV(model_path="a.gguf"), ("transformers", "llama-cpp")),
    (lambda: ChatSamKV(model="builtin"), ("transformers", "llama-cpp")),
    (lambda: Engine.from_pretrained("a.gguf", runtime="llama_cpp"), ("llama-cpp",)),
    (lambda: Engine.from_pretrained("a.gguf", runtime="transformers"), ("transformers",)),
):
    try:
        load()
    except MissingExtra as error:
        assert all(f"'.[{extra}]'" in str(error) for extra in wanted), error
    else:
        raise AssertionError("nothing runs models here")
"""


def run(code: str, folder: Path) -> None:
    ends = "\nassert not {name.split('.')[0] for name in sys.modules} & {*ABSENT}"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code + ends],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # 8 CPU seconds
def test_the_engine_and_both_frameworks_answer_from_caches(tmp_path: Path) -> None:
    run(IN_PYTHON, tmp_path)


@pytest.mark.slow  # 14 CPU seconds
def test_commands_ingest_ask_and_examine(tmp_path: Path) -> None:
    run(BY_COMMANDS, tmp_path)


def test_without_llama_cpp_either_both_extras_are_named(tmp_path: Path) -> None:
    run(NOTHING, tmp_path)
