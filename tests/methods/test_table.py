"""The tables of methods and evictions: names without imports, methods of other distributions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.methods import METHODS, Method, names_by_tokens
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.methods.table import Table

SOURCE = """
from samkv_integrations.methods.base import Method

OURS = Method(name="ours", paper="-", summary="a method of another distribution")
NAMED_OTHERWISE = Method(name="another", paper="-", summary="-")
NONE = None
"""

GROUP = "samkv.methods"


def install(folder: Path, distribution: str, *points: str) -> None:
    """A distribution whose ``points`` are lines of its group, and the module that they name."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join((f"[{GROUP}]", *points)) + "\n")
    (folder / "methods_of_others.py").write_text(SOURCE)


def table() -> Table[Method]:
    """A new table, which has read no entry points yet, with one method of our own."""
    places = {"epic": "samkv_integrations.methods.epic:EPIC"}
    return Table("method", Method, places, group=GROUP)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "methods_of_others", raising=False)
    return tmp_path


@pytest.mark.parametrize("known", [METHODS, EVICTIONS], ids=["methods", "evictions"])
def test_every_name_is_that_of_its_thing(known: Table[Method]) -> None:
    assert [each.name for each in known.values()] == list(known)
    assert len(known) == len(list(known)) and "epics" not in known


def test_names_are_listed_without_torch() -> None:
    code = (
        "import sys; from samkv_integrations import EVICTIONS, METHODS, Eviction, Method; "
        "assert 'auto' in METHODS and 'quest' in EVICTIONS, list(METHODS) + list(EVICTIONS); "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_any_runtime_can_run_is_said() -> None:
    """Our own with no part of a paper with tensors, and with the keys where the prompt has them."""
    assert {"recompute", "reuse", "epic", "auto"} <= set(names_by_tokens())
    for name, method in METHODS.items():
        parts = (method.select, method.recompute, method.update, method.attend)
        of_tensors = [p for p in parts if "runtimes.transformers" in getattr(p, "__module__", "")]
        by_tokens = not of_tensors and method.positions == "global"
        assert method.is_by_tokens is (name in names_by_tokens()) is by_tokens, name


def test_another_distribution_adds_a_method_which_is_loaded_when_it_is_asked_for(
    folder: Path,
) -> None:
    install(folder, "some-methods", "ours = methods_of_others:OURS")
    known = table()
    assert list(known) == ["epic", "ours"] and len(known) == 2 and "ours" in known
    assert "methods_of_others" not in sys.modules
    assert known["ours"].summary == "a method of another distribution"
    assert known["ours"] is known["ours"]
    with pytest.raises(KeyError):
        known["theirs"]


def test_a_method_of_another_distribution_is_found_by_its_name(folder: Path) -> None:
    install(folder, "some-methods", "ours = methods_of_others:OURS")
    code = (
        "from samkv_integrations.methods import METHODS, get_method; import sys; "
        f"sys.path.insert(0, {str(folder)!r}); "
        "assert list(METHODS)[-1] == 'ours'; assert get_method('ours').is_by_tokens"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("point", "told"),
    [
        ("ours = missing_module:OURS", "ModuleNotFoundError: No module named 'missing_module'"),
        ("ours = methods_of_others:THEIRS", "AttributeError"),
        ("ours = methods_of_others:NONE", "is None; 'methods_of_others:NONE' must be a Method"),
        ("ours = methods_of_others:NAMED_OTHERWISE", "must be a Method whose name is 'ours'"),
    ],
)
def test_one_that_cannot_be_loaded_is_named_with_its_distribution(
    folder: Path, point: str, told: str
) -> None:
    install(folder, "some-methods", point)
    known = table()
    assert "ours" in known and known["epic"].name == "epic"
    with pytest.raises(InvalidOption, match="'ours' of the distribution 'some-methods'") as raised:
        known["ours"]
    assert told in str(raised.value)


def test_one_of_ours_that_needs_an_extra_says_which() -> None:
    known = Table[Method]("method", Method, {"ours": "missing_module.paper:OURS"})
    with pytest.raises(MissingExtra, match="'missing_module' is not installed.*transformers"):
        known["ours"]


def test_a_name_of_ours_is_refused_with_its_distribution(folder: Path) -> None:
    install(folder, "some-methods", "epic = methods_of_others:OURS")
    known = table()
    refused = "'epic' of the distribution 'some-methods' .* one of 'samkv-integrations'"
    with pytest.raises(InvalidOption, match=refused):
        list(known)
    assert known["epic"].paper == "arXiv 2410.15332"  # ours stays


def test_a_name_that_two_distributions_give_is_refused(folder: Path) -> None:
    install(folder, "some-methods", "ours = methods_of_others:OURS")
    install(folder, "yet-others", "ours = methods_of_others:OURS")
    with pytest.raises(InvalidOption, match=r"'yet-others'.*one of 'some-methods'"):
        list(table())
