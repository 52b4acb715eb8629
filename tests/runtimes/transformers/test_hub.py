"""Models by hub id where there is no network, and names that are nearly one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samkv_integrations.errors import InvalidOption, ModelNotFound
from samkv_integrations.runtimes.transformers.loading import load_model
from tests.support.models import hf_model, save_model

LOAD = """
import sys
from samkv_integrations import SamkvError
from samkv_integrations.runtimes.transformers import load_model
try:
    print("loaded", load_model(sys.argv[1], device="cpu").name)
except SamkvError as error:
    print(type(error).__name__, error)
"""


def loaded(name: str, home: Path, **environment: str) -> tuple[str, str]:
    """What `LOAD` prints and warns, where nothing listens at the hub's address."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, name],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=inherited
        | {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
        | environment,
    )
    return done.stdout, done.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache of the hub that holds the model someone/small."""
    repository = tmp_path / "hub" / "models--someone--small"
    save_model(hf_model("llama", num_hidden_layers=1), repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return tmp_path


@pytest.mark.slow  # a process, which looks for a hub
def test_an_unknown_id_is_refused_without_trying_again_and_again(tmp_path: Path) -> None:
    """huggingface_hub would try six times for each file, half a minute."""
    printed, warned = loaded("someone/nowhere", tmp_path)
    assert printed.startswith("ModelNotFound model 'someone/nowhere' could not be loaded (")
    assert "a hub id that this machine can reach, 'smollm2' or 'builtin'" in printed
    assert "Retrying" not in warned


@pytest.mark.slow  # a process, which looks for a hub
@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_what_was_downloaded_before_is_used(home: Path, environment: dict[str, str]) -> None:
    printed, warned = loaded("someone/small", home, **environment)
    assert printed.startswith("loaded someone/small")
    assert "Retrying" not in warned


@pytest.mark.parametrize("name", ["buildin", "built-in", "Builtin", "bultin"])
def test_a_name_that_is_nearly_that_of_the_built_in_model(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"no folder '{name}'; did you mean 'builtin'\\?"):
        load_model(name)


@pytest.mark.parametrize("name", [None, "", 5])
def test_what_is_no_name(name: object) -> None:
    with pytest.raises(InvalidOption, match="model name .*; give a hub id, a local folder, or"):
        load_model(name)  # type: ignore[arg-type]
