"""A user's file that names arguments by any of their names passes a strict type checker."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USER = Path(__file__).with_name("typed_user.py")

# What holds no argument is left out, or checking it would take minutes.
SETTINGS = """
[mypy]
strict = True
plugins = pydantic.mypy
namespace_packages = True
explicit_package_bases = True
mypy_path = {root}/connectors/langchain:{root}/connectors/llama-index:{root}
[mypy-samkv_integrations.*,langchain_samkv.*,llama_index.*]
follow_imports = silent
[mypy-torch.*,transformers.*,chromadb.*]
follow_imports = skip
[pydantic-mypy]
init_forbid_extra = True
"""


def test_mypy_is_told_to_look_at_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] and str(USER.relative_to(ROOT)) in settings["files"]
    assert USER.read_text().count("# type: ignore[call-arg]") == 2


@pytest.mark.slow  # a mypy of its own, which knows nothing yet
def test_mypy_with_the_plugin_of_pydantic(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER.read_text())
    (tmp_path / "mypy.ini").write_text(SETTINGS.format(root=ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
