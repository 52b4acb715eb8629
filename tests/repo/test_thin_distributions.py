"""The distributions under ``packaging/``: names that depend on this one, and hold nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.support.wheels import ROOT, THIN, built, main_source, thin_source

MAIN = "samkv-integrations"
EXTRAS = {"langchain-samkv": "langchain", "llama-index-llms-samkv": "llama-index"}
SHOW = """
import importlib.metadata as metadata, json, sys
import langchain_samkv, llama_index.llms.samkv, samkv_integrations
own = metadata.distributions(path=[sys.argv[1]])
found = {each.name: each.version for each in own if each.name in sys.argv[2:]}
files = [m.__file__ for m in (langchain_samkv, llama_index.llms.samkv, samkv_integrations)]
assert all(file.startswith(sys.argv[1]) for file in files), files
print(json.dumps(found))
"""


def project(folder: Path) -> dict[str, Any]:
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


@pytest.mark.parametrize("name", THIN)
def test_it_is_this_version_under_another_name(name: str) -> None:
    main, thin = project(ROOT), project(ROOT / "packaging" / name)
    assert thin["name"] == name
    assert thin["version"] == main["version"]
    assert thin["dependencies"] == [f"{MAIN}[{EXTRAS[name]}]=={main['version']}"]
    assert EXTRAS[name] in main["optional-dependencies"]
    for field in ("classifiers", "license", "requires-python"):
        assert thin[field] == main[field], field


def test_every_folder_is_known() -> None:
    assert {path.name for path in (ROOT / "packaging").iterdir()} == set(THIN) == set(EXTRAS)


# builds three wheels, and imports torch four times: half a minute
@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sources = {name: thin_source(name, tmp_path_factory.mktemp("thin")) for name in THIN}
    sources[MAIN] = main_source(tmp_path_factory.mktemp("main"))
    return {name: built(source, tmp_path_factory.mktemp("out")) for name, source in sources.items()}


def names_in(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_all_are_installed_beside_each_other(wheels: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    # what the wheels depend on is that of the tests, behind what is installed here
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def pip(*arguments: str | Path) -> None:
        run([sys.executable, "-m", "pip", "--python", python, *arguments])

    def shown() -> dict[str, str]:
        command = [python, "-I", "-c", SHOW, own, MAIN, *THIN]
        found: dict[str, str] = json.loads(run(command))
        return found

    pip("install", "--no-deps", "--no-index", "--no-compile", *wheels.values())
    version = project(ROOT)["version"]
    assert shown() == dict.fromkeys((MAIN, *THIN), version)
    files = [name for wheel in wheels.values() for name in names_in(wheel)]
    assert len(files) == len(set(files))
    for name in THIN:
        readme = (ROOT / "packaging" / name / "README.md").read_text(encoding="utf-8")
        (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        assert run([python, "-I", "-c", snippet], tmp_path).strip() == "Flevport 1"
    pip("uninstall", "--yes", *THIN)
    assert shown() == {MAIN: version}


def run(command: Sequence[str | Path], folder: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
