"""Records that are added page by page: the same as at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import Adding, ChromaLink
from samkv_integrations.chroma.records import IngestResult
from tests.support.documents import texts_of_many_lengths
from tests.support.records import builtin

FIRST = texts_of_many_lengths(8)
SHIFTED = ["One more that stands before all the others.", *FIRST[:3], FIRST[1], *FIRST[4:]]
SHORT = [FIRST[6]] * 3


def link_in(folder: Path) -> ChromaLink:
    engine = Engine(builtin(), ChunkStore(folder / "kv"))
    return ChromaLink(open_collection(folder / "chroma", "town", create=True), engine)


def added(link: ChromaLink, texts: list[str], page: int) -> IngestResult:
    adding = Adding(link)
    for at in range(0, len(texts), page):
        part = texts[at : at + page]
        ids = [f"a#{number}" for number in range(at, at + len(part))]
        adding.write(adding.check(ids, part, [[1.0]] * len(part)))
    return replace(adding.finish(), seconds=0.0)


@pytest.mark.parametrize("page", [1, 2, 3])
def test_pages_are_counted_and_released_like_all_at_once(page: int, tmp_path: Path) -> None:
    """Also where a text moves to a later page, or stands in several."""
    at_once, by_page = link_in(tmp_path / "at_once"), link_in(tmp_path / "by_page")
    for texts in (FIRST, SHIFTED, SHORT, FIRST):
        expected = added(at_once, texts, len(texts))
        assert added(by_page, texts, page) == expected
        keys = {by_page.engine.key_of(text) for text in texts}
        assert expected.n_records == len(texts)
        assert all(by_page.engine.is_cached(text) for text in texts)
        assert by_page.collection.get()["documents"] == at_once.collection.get()["documents"]
        n_chunks = {link.engine.store.stats().n_chunks for link in (at_once, by_page)}
        assert len(n_chunks) == 1 and n_chunks.pop() >= len(keys)


def test_a_text_that_moves_to_a_later_page_is_not_computed_again(tmp_path: Path) -> None:
    link = link_in(tmp_path)
    added(link, FIRST, 2)
    done = added(link, ["One more.", *FIRST], 2)
    assert (done.n_cached, done.n_hit, done.n_released) == (1, len(FIRST), 0)
