"""Wheels of this repository, built as for a release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THIN = ("langchain-samkv", "llama-index-llms-samkv")
"""Folders under ``packaging/``, each of a distribution without modules."""


def main_source(folder: Path) -> Path:
    """A copy of what the wheel is made of: setuptools leaves files behind, and takes up those that
    it left before."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("samkv_integrations", "connectors"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def thin_source(name: str, folder: Path) -> Path:
    """Likewise, of a distribution without modules."""
    return Path(shutil.copytree(ROOT / "packaging" / name, folder / name))


def built(source: Path, out: Path) -> Path:
    """The wheel of a source tree, which nothing is downloaded for."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path
