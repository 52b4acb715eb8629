"""What llama.cpp cannot do is told in its own words, or with the next step."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from langchain_samkv import ChatSamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import (
    FingerprintMismatch,
    InvalidOption,
    MissingExtra,
    ModelNotFound,
    PromptTooLong,
    UnknownOption,
)
from samkv_integrations.runtimes import load_runtime
from samkv_integrations.runtimes.llama_cpp.library import binding
from samkv_integrations.runtimes.llama_cpp.library.binding import load_binding
from samkv_integrations.store.indexed import require
from tests.contracts.runtime_contract import PROMPT, TEXTS
from tests.support.gguf_files import model_for_gguf, write_gguf
from tests.support.llama_cpp import shared_smollm2, with_llama_cpp

pytestmark = with_llama_cpp


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"))


def test_a_gguf_file_is_loaded_by_both_frameworks(file: Path) -> None:
    for llm in (SamKVLLM, ChatSamKV):
        made = llm(model_path=str(file), n_ctx=1024, n_threads=1, device_map="cpu")
        assert type(made.engine.model).__name__ == "LlamaCppModel"
        assert made.engine.model.n_threads() == 1
    again: Any = SamKVLLM.from_dict(SamKVLLM(model_path=str(file), n_ctx=512).to_dict())
    assert again.n_ctx == again.engine.model.context_window == 512
    assert ChatSamKV(engine=made.engine).model_copy(update={"temperature": 0.5})


def test_a_build_without_a_graphics_card_runs_no_layers_there(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if load_binding().has_device:
        pytest.skip("this build of llama.cpp has a graphics card")
    with pytest.raises(InvalidOption, match="n_gpu_layers=3, and .* has no graphics card"):
        Engine.from_pretrained(str(file), n_gpu_layers=3)
    assert Engine.from_pretrained(str(file), n_gpu_layers=0).model.device_name == "cpu"
    with caplog.at_level("WARNING"):  # as users of llama-cpp-python have it on any machine
        assert Engine.from_pretrained(str(file), n_gpu_layers=-1).model.device_name == "cpu"
    assert "no graphics card: the CPU runs all layers" in caplog.text


def test_more_cells_than_memory_are_refused(file: Path) -> None:
    with pytest.raises(InvalidOption, match=r"n_ctx=1000000000; so many cells take .* GB"):
        Engine.from_pretrained(str(file), n_ctx=10**9)


def test_arguments_of_llama_cpp_python_that_are_not_needed_are_told() -> None:
    for llm, name in ((SamKVLLM, "verbose"), (ChatSamKV, "chat_format"), (SamKVLLM, "model_url")):
        with pytest.raises(UnknownOption, match=name):
            llm(model_path="smollm2", **{name: False})


def test_a_file_that_was_cut_is_told_in_the_words_of_llama_cpp(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ModelNotFound, match=r"llama\.cpp cannot load '.*tiny\.gguf' \(") as raised:
        Engine.from_pretrained(str(file))
    assert "it says nothing" not in str(raised.value)
    assert "give a whole GGUF file" in str(raised.value)


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("Not a model. " * 100)
    with pytest.raises(ModelNotFound, match=r"llama\.cpp cannot load"):
        Engine.from_pretrained(str(tmp_path / "a.gguf"))


def test_without_a_package_the_extra_is_named(file: Path, monkeypatch: Any) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(binding, "version", version)
    monkeypatch.setattr("samkv_integrations.runtimes.llama_cpp.loading.load_binding",
                        load_binding.__wrapped__)  # fmt: skip
    with pytest.raises(MissingExtra, match=r"'\.\[llama-cpp\]'"):
        load_runtime(str(file), "llama_cpp")


def test_a_prompt_that_needs_more_cells_says_how_to_get_them(file: Path) -> None:
    engine = Engine.from_pretrained(str(file), n_ctx=256, n_threads=1)
    trained = Engine.from_pretrained(str(file), n_ctx=10**6).model.context_window
    wider = rf"or load it with a larger n_ctx than 256 \(up to {trained}\)$"
    with pytest.raises(PromptTooLong, match=wider):
        engine.generate("A long prompt. " * 100)
    with pytest.raises(PromptTooLong, match=wider):
        engine.generate("A prompt.", max_new_tokens=256)


def test_hot_chunks_are_for_transformers(file: Path) -> None:
    with pytest.raises(InvalidOption, match="hot_bytes='1 GB'.*leave it out"):
        Engine.from_pretrained(str(file), hot_bytes="1 GB")


def test_caches_of_another_runtime_are_told_with_its_name(file: Path, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "kv")
    by_transformers = Engine.from_pretrained(str(file), store, runtime="transformers")
    by_transformers.cache_chunks(TEXTS)
    engine = Engine.from_pretrained(str(file), store, n_threads=1)
    assert engine.generate(PROMPT, on_miss="text", max_new_tokens=2).report.reused == 0
    with pytest.raises(FingerprintMismatch, match="or give .*runtime='transformers'$"):
        require(store, engine.fingerprint)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told_to_load_the_model_itself() -> None:
    engine = Engine(shared_smollm2())
    engine.generate(PROMPT, max_new_tokens=1)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        told = "nothing"
        try:
            Engine(shared_smollm2()).generate(PROMPT, max_new_tokens=1)
        except InvalidOption as error:
            told = str(error)
        finally:
            os.write(writes, told.encode())
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        assert "forked after llama.cpp had loaded the model" in pipe.read()
    os.waitpid(child, 0)
    assert engine.generate(PROMPT, max_new_tokens=1).text  # the parent goes on


SHARED = """
import sys
from samkv_integrations import ChunkStore, Engine
from tests.contracts.runtime_contract import PROMPT, TEXTS

engine = Engine.from_pretrained("smollm2", ChunkStore("kv"), n_ctx=1024, n_threads=1)
engine.cache_chunks(TEXTS)
answer = engine.generate(PROMPT, method="reuse", max_new_tokens=8)
assert answer.report.reused == len(TEXTS), answer.report
print(answer.text)
"""


@pytest.mark.slow  # two processes that load a real model: 13 CPU seconds
def test_two_processes_share_a_store(tmp_path: Path) -> None:
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(2)
    ]  # fmt: skip
    printed = [process.communicate() for process in begun]
    assert [process.returncode for process in begun] == [0, 0], printed
    assert printed[0][0] == printed[1][0]
    store = ChunkStore(tmp_path / "kv")
    assert len(store.keys()) == len(TEXTS)
