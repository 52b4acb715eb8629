"""What is in the wheel: every module once, the built-in model, and nothing that hides others."""

from __future__ import annotations

import re
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wheels import ROOT, built, main_source

MAX_WHEEL_BYTES = 45_000_000
TYPED = (
    "langchain_samkv",
    "samkv_integrations",
    "llama_index/llms/samkv",
    "llama_index/postprocessor/samkv",
    "llama_index/vector_stores/samkv",
)
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

EXTRA_OF_AN_ERROR = re.compile(r"""MissingExtra\.of\(.*, "([a-z-]+)"\)""")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = main_source(tmp_path_factory.mktemp("source"))
    return built(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        assert len(set(archive.namelist())) == len(archive.namelist())
        return set(archive.namelist())


def dist_info(wheel: Path, name: str) -> bytes:
    with ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(path)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return message_from_bytes(dist_info(wheel, "METADATA"))


def test_every_module_and_no_other(names: set[str]) -> None:
    """Packages are listed by hand, so a new one can be forgotten."""
    expected = {
        file.relative_to(base).as_posix()
        for folder, base in (("samkv_integrations", ROOT), ("connectors", ROOT / "connectors"))
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected


def test_the_builtin_model_is_whole(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        for name in ASSETS:
            path = f"samkv_integrations/assets/{name}"
            assert archive.read(path) == (ROOT / path).read_bytes(), name


def test_nothing_else_is_shipped(names: set[str]) -> None:
    """No tests, no caches, no leftovers of a run inside the package."""
    rest = {n for n in names if not n.endswith(".py") and ".dist-info/" not in n}
    assert rest == {f"{package}/py.typed" for package in TYPED} | {
        *(f"samkv_integrations/assets/{name}" for name in ASSETS),
        "samkv_integrations/inspection/page.html",
        "samkv_integrations/server/page.html",
    }


def test_the_wheel_stays_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_command_is_installed(wheel: Path) -> None:
    text = dist_info(wheel, "entry_points.txt").decode()
    assert "[console_scripts]\nsamkv = samkv_integrations.cli.app:main" in text


def test_every_extra_that_an_error_names_exists(metadata: Message) -> None:
    named = set()
    for folder in ("samkv_integrations", "connectors"):
        for file in (ROOT / folder).rglob("*.py"):
            named |= set(EXTRA_OF_AN_ERROR.findall(file.read_text(encoding="utf-8")))
    assert named
    assert named <= set(metadata.get_all("Provides-Extra", []))


def test_every_requirement_is_pinned(metadata: Message) -> None:
    """What is not pinned may change under a test run without a change here."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pinned[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    assert required
    for requirement in required:
        name = canonicalize_name(requirement.name)
        if name != "samkv-integrations":
            assert requirement.specifier.contains(pinned[name]), requirement
