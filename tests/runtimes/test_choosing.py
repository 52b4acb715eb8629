"""Which runtime runs a model, and what it says to the options of another."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from langchain_samkv import ChatSamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine, errors
from samkv_integrations.errors import InvalidOption, MissingExtra, ModelNotFound, UnknownOption
from samkv_integrations.option import declared
from samkv_integrations.options import LlamaCppOptions, ModelOptions
from samkv_integrations.runtimes import RUNTIMES, load_runtime, model_files, runtime_for
from samkv_integrations.runtimes.llama_cpp.library import binding
from samkv_integrations.runtimes.transformers import kind
from tests.cli.running import error_of

LLAMA_CPP, TRANSFORMERS = {"llama_cpp"}, {"torch", "transformers"}
LLMS = (SamKVLLM, ChatSamKV)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty GGUF file, which nobody has to read, and folders of models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_files, "smollm2", lambda: "model.gguf")
    for name in ("model.gguf", "one/a.gguf", "both/a.gguf", "both/model.safetensors",
                 "split/m-00001-of-00002.gguf", "split/m-00002-of-00002.gguf"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets only these packages be installed."""

    def install(*packages: str) -> None:
        def found(name: str) -> str | None:
            return name if name in packages else None

        def version(name: str) -> str:
            if name.replace("llama-cpp-python", "llama_cpp") not in packages:
                raise PackageNotFoundError(name)
            return "1.0"

        for module in (binding, kind, errors):
            monkeypatch.setattr(module, "find_spec", found)
        monkeypatch.setattr(binding, "version", version)

    return install


GGUF = ("model.gguf", "one", "split", "split/m-00002-of-00002.gguf", "smollm2")
OTHERS = ("builtin", "both", "someone/a-model", "no/such/folder")


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        (LLAMA_CPP | TRANSFORMERS, "llama_cpp"),
        ({"xllamacpp"} | TRANSFORMERS, "llama_cpp"),
        (LLAMA_CPP, "llama_cpp"),
        (TRANSFORMERS, "transformers"),
    ],
)
@pytest.mark.parametrize("model", GGUF)
def test_a_gguf_file_runs_on_llama_cpp_where_that_is_installed(
    files: Path, installed: Any, packages: set[str], expected: str, model: str
) -> None:
    installed(*packages)
    assert runtime_for(model).name == expected
    assert runtime_for(model, "transformers").name == "transformers"


@pytest.mark.parametrize("model", OTHERS)
def test_all_else_runs_on_transformers(files: Path, model: str) -> None:
    assert runtime_for(model).name == "transformers"
    assert runtime_for(model, "llama_cpp").name == "llama_cpp"


def test_where_nothing_is_installed_both_extras_are_named(files: Path, installed: Any) -> None:
    installed()
    with pytest.raises(MissingExtra, match=r"'\.\[transformers\]'.*'\.\[llama-cpp\]'"):
        runtime_for("model.gguf")
    with pytest.raises(MissingExtra, match=r"'\.\[transformers\]'"):
        load_runtime("builtin")


@pytest.mark.parametrize("model", ["nowhere.gguf", "./folder/nowhere.gguf"])
def test_a_file_that_does_not_exist_is_told(files: Path, model: str) -> None:
    for llm in LLMS:
        with pytest.raises(ModelNotFound, match=r"there is no file '.*nowhere\.gguf'"):
            llm(model_path=model)


def test_every_option_has_a_runtime_that_takes_it() -> None:
    known = {option for each in ("transformers", "llama_cpp") for option in RUNTIMES[each].options}
    own = declared(ModelOptions).keys() | declared(LlamaCppOptions).keys() | {"tokenizer", "device"}
    assert known == own - {"model_name", "device_map", "runtime"}


VALUES: dict[str, Any] = {
    "n_gpu_layers": 1, "n_ctx": 512, "type_k": "f16", "type_v": 1, "main_gpu": 0,
    "tensor_split": [1.0], "use_mmap": False, "use_mlock": True,
}  # fmt: skip
OF_TRANSFORMERS: dict[str, Any] = {
    "dtype": "float32", "model_kwargs": {"revision": "main"}, "tokenizer_name": "builtin",
    "tokenizer_kwargs": {"revision": "main"},
}  # fmt: skip


@pytest.mark.parametrize("llm", LLMS)
@pytest.mark.parametrize("name", VALUES)
def test_options_of_llama_cpp_are_not_for_transformers(files: Path, llm: Any, name: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        llm(model="model.gguf", runtime="transformers", **{name: VALUES[name]})
    told = str(raised.value)
    assert told.startswith(f"{name}={VALUES[name]!r} is no option of transformers")
    assert told.endswith("; leave it out, or give runtime='llama_cpp'")
    with pytest.raises(InvalidOption, match="or give runtime='llama_cpp' and a GGUF file$"):
        llm(model="builtin", **{name: VALUES[name]})


@pytest.mark.parametrize("llm", LLMS)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_options_of_transformers_are_not_for_llama_cpp(
    files: Path, installed: Any, llm: Any, name: str
) -> None:
    installed("llama_cpp", *TRANSFORMERS)
    with pytest.raises(InvalidOption) as raised:
        llm(model="model.gguf", **{name: OF_TRANSFORMERS[name]})
    told = str(raised.value)
    assert told.startswith(f"{name}={OF_TRANSFORMERS[name]!r} is no option of llama_cpp")
    assert "'model.gguf'" in told and "n_ctx" in told
    assert told.endswith("; leave it out, or give runtime='transformers'")


def test_an_engine_and_a_command_say_the_same(files: Path, installed: Any) -> None:
    installed("llama_cpp", *TRANSFORMERS)
    with pytest.raises(InvalidOption, match="dtype='float32' is no option of llama_cpp"):
        Engine.from_pretrained("model.gguf", dtype="float32")
    told = error_of("doctor", "--model", "model.gguf", "--dtype", "float32")
    assert "--dtype=float32 is no option of llama_cpp" in told
    assert told.endswith("; leave it out, or give --runtime=transformers")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_a_device_is_given_to_llama_cpp_as_layers(
    files: Path, installed: Any, device: str
) -> None:  # fmt: skip
    installed("llama_cpp")
    with pytest.raises(InvalidOption, match=rf"device='{device}'; .*n_gpu_layers \(-1 for all\)"):
        Engine.from_pretrained("model.gguf", device=device)
    with pytest.raises(InvalidOption, match="n_gpu_layers=3 with device='cpu'; leave out either"):
        Engine.from_pretrained("model.gguf", device="cpu", n_gpu_layers=3)


@pytest.mark.parametrize(
    ("option", "must"),
    [
        ({"n_gpu_layers": -2}, "-1 (all layers) or more"),
        ({"n_ctx": 0}, "at least 1"),
        ({"n_threads": 0}, "at least 1"),
        ({"main_gpu": -1}, "0 or more"),
        ({"tensor_split": []}, "a list of numbers"),
        ({"tensor_split": [0.0, 0.0]}, "a list of numbers"),
        ({"tensor_split": [1.0, -1.0]}, "a list of numbers"),
        ({"tensor_split": [float("nan")]}, "a list of numbers"),
    ],
)
def test_a_wrong_value_is_told_before_a_model_is_loaded(
    files: Path, option: Any, must: str
) -> None:
    for make in (Engine.from_pretrained, lambda model, **given: SamKVLLM(model=model, **given)):
        with pytest.raises(InvalidOption) as raised:
            make("model.gguf", **option)
        assert f"it must be {must}" in str(raised.value)


def test_a_loaded_model_of_transformers_is_not_for_llama_cpp() -> None:
    with pytest.raises(InvalidOption, match="runtime='llama_cpp' loads a GGUF file by itself"):
        SamKVLLM(model=object(), tokenizer=object(), runtime="llama_cpp")
    with pytest.raises(InvalidOption, match="n_ctx is for loading, and a loaded model was given"):
        SamKVLLM(model=object(), tokenizer=object(), n_ctx=512)


@pytest.mark.parametrize("llm", LLMS)
def test_an_unknown_runtime_and_two_names_of_a_model_are_told(files: Path, llm: Any) -> None:
    with pytest.raises(UnknownOption, match="did you mean 'llama_cpp'"):
        llm(model="model.gguf", runtime="llama-cpp")
    with pytest.raises(InvalidOption, match="model_path.* are the same option; give one"):
        llm(model="a", model_path="b")
    with pytest.raises(UnknownOption, match="give repetition_penalty"):
        llm(model="a", repeat_penalty=1.1)
