"""The three distributions: every module in one wheel, and nothing that hides others."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wheels import CORE, FOLDERS, PACKAGES, ROOT, built, source

MAX_WHEEL_BYTES = 45_000_000
CONNECTORS = tuple(FOLDERS)[1:]
BUILTIN = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
ASSETS = (
    "README.md",
    *(f"builtin/{name}" for name in BUILTIN),
)
NO_MODULES = {
    CORE: {
        "samkv_integrations/py.typed",
        *(f"samkv_integrations/assets/{name}" for name in ASSETS),
        "samkv_integrations/lab/inspection/page.html",
        "samkv_integrations/server/page.html",
    },
    "langchain-samkv": {"langchain_samkv/py.typed"},
    "llama-index-llms-samkv": {
        f"llama_index/{part}/samkv/py.typed" for part in ("llms", "postprocessor", "vector_stores")
    },
}
"""Distribution -> what else it ships."""

EXTRA_OF_AN_ERROR = re.compile(
    r"""MissingExtra\.(?:of\(.*, "|unless_installed\("|.*extra=")([a-z-]+)\""""
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def wheel(name: str) -> Path:
        tree = source(name, tmp_path_factory.mktemp("source"))
        return built(tree, tmp_path_factory.mktemp("wheel"))

    return {name: wheel(name) for name in FOLDERS}


def names_in(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


def dist_info(wheel: Path, name: str) -> bytes:
    with ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path)


def metadata(wheel: Path) -> Message:
    return message_from_bytes(dist_info(wheel, "METADATA"))


def project(name: str) -> dict[str, Any]:
    text = (FOLDERS[name] / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


# -- what is declared -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector_is_of_the_release_of_the_core(name: str) -> None:
    core, connector = project(CORE), project(name)
    assert connector["name"] == name
    assert connector["version"] == core["version"]
    (needed,) = (r for r in map(Requirement, connector["dependencies"]) if r.name == CORE)
    assert str(needed.specifier) == f"=={core['version']}"
    assert needed.extras <= {*core["optional-dependencies"]}
    for field in ("classifiers", "license", "requires-python"):
        assert connector[field] == core[field], field
    assert (FOLDERS[name] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_every_folder_of_connectors_is_a_distribution() -> None:
    folders = {path for path in (ROOT / "connectors").iterdir() if path.is_dir()}
    assert folders == {FOLDERS[name] for name in CONNECTORS}


def test_the_core_requires_no_engine_and_no_framework() -> None:
    core = project(CORE)
    required = {Requirement(text).name for text in core["dependencies"]}
    assert not required & {"torch", "transformers", "safetensors", "chromadb"}
    extras = [text for texts in core["optional-dependencies"].values() for text in texts]
    dev = core["optional-dependencies"]["dev"]
    named = {Requirement(text).name for text in extras if text not in dev}
    assert not {n for n in named if n.startswith(("langchain", "llama-index"))}
    assert not named & {*CONNECTORS}  # which no index has


def test_every_extra_that_an_error_names_exists() -> None:
    named = set()
    for folder in ("samkv_integrations", "connectors"):
        for file in (ROOT / folder).rglob("*.py"):
            named |= set(EXTRA_OF_AN_ERROR.findall(file.read_text(encoding="utf-8")))
    assert {"chroma", "transformers"} <= named
    assert named <= set(project(CORE)["optional-dependencies"])


@pytest.mark.parametrize("name", FOLDERS)
def test_every_requirement_is_pinned(name: str) -> None:
    """What is not pinned may change under a test run without a change here."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pinned[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    declared = project(name)
    extras = declared.get("optional-dependencies", {}).values()
    required = [
        Requirement(text) for texts in (declared["dependencies"], *extras) for text in texts
    ]
    assert required
    for requirement in required:
        if (needed := canonicalize_name(requirement.name)) != CORE:
            assert requirement.specifier.contains(pinned[needed]), requirement


# -- what is built: some seconds each ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_every_module_and_nothing_else(wheels: dict[str, Path], name: str) -> None:
    """Packages are listed by hand, so a new one can be forgotten; no tests, caches, leftovers."""
    names = names_in(wheels[name])
    assert len(names) == len(set(names))
    modules = {
        file.relative_to(FOLDERS[name]).as_posix()
        for file in (FOLDERS[name] / PACKAGES[name]).rglob("*.py")
    }
    assert {n for n in names if ".dist-info/" not in n} == modules | NO_MODULES[name]


@pytest.mark.slow
def test_no_wheel_has_a_file_of_another(wheels: dict[str, Path]) -> None:
    files = [name for wheel in wheels.values() for name in names_in(wheel)]
    assert len(files) == len(set(files))
    assert {name.split("/")[0] for name in names_in(wheels[CORE]) if ".dist-info/" not in name} == {
        "samkv_integrations"
    }


@pytest.mark.slow
def test_the_builtin_model_is_whole(wheels: dict[str, Path]) -> None:
    with ZipFile(wheels[CORE]) as archive:
        for name in ASSETS:
            path = f"samkv_integrations/assets/{name}"
            assert archive.read(path) == (ROOT / path).read_bytes(), name


@pytest.mark.slow
def test_the_wheels_stay_small_and_are_for_every_machine(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        assert wheel.stat().st_size < MAX_WHEEL_BYTES
        assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_the_command_is_installed(wheels: dict[str, Path]) -> None:
    text = dist_info(wheels[CORE], "entry_points.txt").decode()
    assert "[console_scripts]\nsamkv = samkv_integrations.cli.app:main" in text
    assert metadata(wheels[CORE])["Name"] == CORE


Installed = Callable[..., tuple[Path, Path]]


@pytest.fixture
def installed(tmp_path: Path, wheels: dict[str, Path]) -> Installed:
    """Installs wheels into a new environment; returns its python and its own site-packages.

    What the wheels depend on is the tests', behind what is installed.
    """

    def install(*names: str) -> tuple[Path, Path]:
        folder = tmp_path / "env"
        venv.create(folder, with_pip=False, symlinks=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
        python = folder / "bin" / "python"
        options = ("--no-deps", "--no-index", "--no-compile")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options]
        run([*pip, *(str(wheels[name]) for name in names)])
        return python, own

    return install


@pytest.mark.slow
@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector_brings_no_other_framework(installed: Installed, name: str) -> None:
    python, own = installed(CORE, name)
    folders = {path.name for path in own.iterdir() if path.is_dir()}
    assert {f for f in folders if not f.endswith(".dist-info")} == {PACKAGES[CORE], PACKAGES[name]}
    readme = (FOLDERS[name] / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert run([python, "-I", "-c", snippet], own.parents[2]).strip() == "Flevport 1"


WITHOUT_ENGINE = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
import samkv_integrations, samkv_integrations.errors
from samkv_integrations.cli.app import main
try:
    samkv_integrations.Engine.from_pretrained("builtin")
except samkv_integrations.errors.MissingExtra as error:
    print(error, file=sys.stderr)
sys.argv = ["samkv", "ingest", sys.argv[1]]
main()
"""


@pytest.mark.slow
def test_the_core_alone_says_what_it_lacks(installed: Installed, tmp_path: Path) -> None:
    python, _ = installed(CORE)
    (tmp_path / "a.txt").write_text("Lena Harman works in Zenoburg.")
    done = subprocess.run(
        [python, "-I", "-c", WITHOUT_ENGINE, tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    says = (
        "'builtin' is not a GGUF file, and transformers, which runs other models, is not installed"
    )
    assert done.stderr.count(says) == 2
    assert done.stderr.count("pip install '.[transformers]'") == 2


def run(command: Sequence[str | Path], folder: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
