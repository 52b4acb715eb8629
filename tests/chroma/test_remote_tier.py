"""Records whose caches are in a remote tier too, which may not answer when they are to go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.engine import Engine
from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.objects import Objects
from tests.support.models import tiny_model

SECRET = bytes(32)
TEXTS = {"a": "The harbour of Flevport is closed.", "b": "The fair of Herstead is in January."}
OTHER = "The harbour of Flevport is open again."
Change = Callable[[ChromaLink], object]


@pytest.fixture
def link(tmp_path: Path) -> ChromaLink:
    link = linked(tmp_path, remote=f"file://{tmp_path}/share/kv")
    link.add(list(TEXTS), list(TEXTS.values()), [[1.0, 0.0]] * 2)
    return link


def linked(folder: Path, remote: str | None) -> ChromaLink:
    store = ChunkStore(folder / "kv", remote=remote, secret=SECRET)
    engine = Engine(tiny_model("llama"), store, prefix_bytes=0)
    return ChromaLink(open_collection(folder / "chroma", "town", create=True), engine)


@contextmanager
def outage(folder: Path, leaves: str = "nothing to be read") -> Iterator[None]:
    """The share is not mounted."""
    share, away = folder / "share", folder / "away"
    share.rename(away)
    if leaves == "an empty folder":
        share.mkdir()
    else:
        share.write_bytes(b"")
    yield
    share.rmdir() if share.is_dir() else share.unlink()
    away.rename(share)


def texts_of(link: ChromaLink) -> dict[str, str]:
    rows = link.collection.get(include=["documents"])
    return dict(zip(rows["ids"], rows["documents"] or (), strict=True))


def is_kept(folder: Path, text: str) -> bool:
    """Whether a text is in any file of the caches."""
    files = [*(folder / "kv").rglob("*"), *(folder / "share").rglob("*")]
    return any(text.encode() in file.read_bytes() for file in files if file.is_file())


CHANGES: dict[str, Change] = {
    "delete": lambda link: link.delete(["a"]),
    "delete where": lambda link: link.delete(where={"samkv_key": {"$ne": "none"}}),
    "clear": lambda link: link.clear(),
    "replace": lambda link: link.add(["a"], [OTHER], [[1.0, 0.0]]),
    "replace by no chunk": lambda link: link.add(
        ["a"], ["[picture]"], [[1.0, 0.0]], without_cache={"a"}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ("nothing to be read", "nothing is deleted while the remote tier does not answer"),
        ("an empty folder", r"store\.json is gone; mount the share"),
    ],
)
def test_nothing_goes_while_the_remote_tier_does_not_answer(
    leaves: str, why: str, change: Change, link: ChromaLink, tmp_path: Path
) -> None:
    with outage(tmp_path, leaves):
        with pytest.raises(StoreError, match=why):
            change(link)
        assert texts_of(link) == TEXTS
        assert link.engine.is_cached(TEXTS["a"])
        assert not link.engine.is_cached(OTHER)  # nor was it computed for nothing
    assert is_kept(tmp_path, TEXTS["a"])
    change(link)  # the same again finishes it
    assert texts_of(link).get("a") != TEXTS["a"]
    assert not link.engine.is_cached(TEXTS["a"])
    assert not is_kept(tmp_path, TEXTS["a"])


def test_new_records_need_no_remote_tier(link: ChromaLink, tmp_path: Path) -> None:
    with outage(tmp_path):
        link.add(["a", "c"], [TEXTS["a"], OTHER], [[1.0, 0.0]] * 2)  # nothing is replaced
    assert texts_of(link) == {**TEXTS, "c": OTHER}


@pytest.mark.parametrize("change", [CHANGES["delete"], CHANGES["replace"]], ids=["del", "add"])
def test_an_outage_in_between_is_told_with_what_mends_it(
    change: Change, link: ChromaLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Objects, path: str) -> bool:
        raise CacheMiss("io", "nobody answers")

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "remove", fails)
        with pytest.raises(StoreError, match=r"kv_link.sync\(grace_s=0\).*sync --grace 0"):
            change(link)
    assert texts_of(link).get("a") != TEXTS["a"]
    assert is_kept(tmp_path, TEXTS["a"])
    assert link.sync(grace_s=0).n_pruned == 1
    assert not is_kept(tmp_path, TEXTS["a"])


def test_who_is_not_told_of_the_remote_tier_deletes_no_record(
    link: ChromaLink, tmp_path: Path
) -> None:
    alone = linked(tmp_path, remote=None)
    for change in CHANGES.values():
        with pytest.raises(StoreError, match="give --remote"):
            change(alone)
        assert texts_of(alone) == TEXTS
    link.delete(["a"])
    assert not is_kept(tmp_path, TEXTS["a"])
