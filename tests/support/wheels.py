"""Wheels of this repository, built as for a release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CORE = "samkv-integrations"
FOLDERS = {
    CORE: ROOT,
    "langchain-samkv": ROOT / "connectors" / "langchain",
    "llama-index-llms-samkv": ROOT / "connectors" / "llama-index",
}
"""Distribution -> the folder of its pyproject.toml."""
PACKAGES = {
    CORE: "samkv_integrations",
    "langchain-samkv": "langchain_samkv",
    "llama-index-llms-samkv": "llama_index",
}
"""Distribution -> the folder beside its pyproject.toml that holds all its modules."""


def source(name: str, folder: Path) -> Path:
    """A copy of what the wheel is made of: setuptools leaves files behind, and takes up those that
    it left before."""
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(FOLDERS[name] / file, folder)
    package = PACKAGES[name]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(FOLDERS[name] / package, folder / package, ignore=ignored)
    return folder


def built(source: Path, out: Path) -> Path:
    """The wheel of a source tree, which nothing is downloaded for."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path
