"""The documentation: the site builds without a warning, and says what is there and nothing else."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import griffe
import pytest
from typer.testing import CliRunner

from benchmarks.commands import markdown_table
from samkv_integrations.cli.app import app
from samkv_integrations.errors import MISS_REASONS

ROOT = Path(__file__).parents[2]
CONNECTORS = (ROOT / "connectors" / "langchain", ROOT / "connectors" / "llama-index")
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

PUBLIC = (
    "langchain_samkv",
    "llama_index.llms.samkv",
    "llama_index.postprocessor.samkv",
    "llama_index.vector_stores.samkv",
    "samkv_integrations",
    "samkv_integrations.chroma",
    "samkv_integrations.ingest.cluster",
    "samkv_integrations.runtimes.transformers.eviction",
    "samkv_integrations.methods",
    "samkv_integrations.runtimes.transformers",
    "samkv_integrations.prompt",
)
"""Modules whose ``__all__`` is for users."""

CONTRACTS = (
    "samkv_integrations.store.base",
    "samkv_integrations.errors",
    "samkv_integrations.runtimes.transformers.eviction.base",
    "samkv_integrations.methods.base",
    "samkv_integrations.methods.eviction",
    "samkv_integrations.prompt.text",
    "samkv_integrations.runtimes.base",
    "samkv_integrations.runtimes.transformers.papers.base",
)
"""Modules of which every name without an underscore is for users, who may build on it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make docs`` builds, in another folder."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def modules() -> dict[str, griffe.Object]:
    """The public modules, read from their source."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT), *map(str, CONNECTORS)])
    for module in PUBLIC:
        loader.load(module)
    loader.resolve_aliases(external=False)
    return {name: loader.modules_collection[name] for name in (*PUBLIC, *CONTRACTS)}


def public_members(module: griffe.Object) -> dict[str, griffe.Object]:
    """Name -> what it names, an alias resolved."""
    if module.path in CONTRACTS:
        own = {n: m for n, m in module.members.items() if not m.is_alias and n[0] != "_"}
        assert own, module.path
        return own
    assert module.exports, module.path
    found = {str(name): module.members[str(name)] for name in module.exports}
    return {name: m.final_target if m.is_alias else m for name, m in found.items()}


def test_the_site_is_built_strictly(site: Path) -> None:
    for page in PAGES:
        html = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in html, page
    assert 'class="mermaid"' in (site / "architecture.html").read_text(encoding="utf-8")


def test_the_site_needs_no_other_site_to_be_read(site: Path) -> None:
    """No fonts, styles or scripts of others; links in the text may lead anywhere.

    One exception, which no page names: the theme's script asks a CDN for mermaid where a page has a
    diagram. Without it the reader sees the diagram's text.
    """
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|link)\b[^>]*?\b(?:src|href)=\"?(https?:[^\"\s>]+)", html
        )
        assert not loaded, (page, loaded)


def test_every_public_name_is_in_the_reference(
    site: Path, modules: dict[str, griffe.Object]
) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    shown = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    for module in modules.values():
        for name, member in public_members(module).items():
            assert {f"{module.path}.{name}", member.path} & shown, f"{module.path}.{name}"


def test_the_table_of_methods_is_that_of_the_command() -> None:
    """If this fails, put the table of the message into the page."""
    done = CliRunner().invoke(app, ["methods", "--json"])
    rows = json.loads(done.stdout)["rows"]
    cells = [(f"`{row['name']}`", row["kind"], row["paper"], row["summary"]) for row in rows]
    table = markdown_table(("name", "kind", "paper", "summary"), cells, left=4)
    assert table in (DOCS / "methods.md").read_text(encoding="utf-8"), table


def test_every_reason_of_a_miss_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert [reason for reason in MISS_REASONS if f"\n| `{reason}` | " not in page] == []


DOTTED = re.compile(r"`((?:samkv_integrations|langchain_samkv|llama_index)\.[\w.]+\w)`")
IN_CORE = re.compile(
    r"`((?:chroma|chunks|cli|frameworks|ingest|lab|methods|plan|prompt|runtimes|server|serving)"
    r"\.[\w.]+\w)`"
)
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|toml|txt))`")


def names_on(page: str) -> set[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    inside = {
        f"samkv_integrations.{name}"
        for name in IN_CORE.findall(text)
        if not name.endswith((".py", ".safetensors"))  # those are files
    }
    return inside | set(DOTTED.findall(text))


def exists(name: str) -> bool:
    """Whether the longest importable beginning of ``name`` has the rest as attributes."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError:
            continue
        for part in parts[stop:]:
            fields = getattr(found, "__dataclass_fields__", {})
            if not hasattr(found, part) and part not in fields:
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("api/")])
def test_names_of_ours_exist(page: str) -> None:
    """Full names, and those from a package of the core on: ``methods.base.Method``."""
    assert not {name for name in names_on(page) if not exists(name)}


@pytest.mark.parametrize("page", [*PAGES, "../CONTRIBUTING.md", "../README.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """From the root of the repository, of the core, or of the connectors."""
    bases = (ROOT, ROOT / "samkv_integrations", *CONNECTORS)
    named = set(FILE.findall((DOCS / page).read_text(encoding="utf-8")))
    assert not {path for path in named if not any((base / path).is_file() for base in bases)}
