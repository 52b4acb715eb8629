"""Texts have one bare form, however they are written, and its characters are found again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samkv_integrations.cache.bare import Bare, is_written_as
from tests.support.writers import WRITERS

PIECES = st.sampled_from([
    *"ab nrtfux0'\"/\\&;<>é…😀\n\t\r\f\xa0\u200b\u2028", "\\n", "\\\\", "\\u00e9",
    "\\x41", "\\ud83d\\ude00", "&amp;", "&lt;", "&quot;", "&#39;", "&#x27;",
    "amp;", "lt;", "#39;", "u0026", "word", "  ",
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def bare(text: str) -> str:
    return Bare(text).text.strip()


@pytest.mark.parametrize(("written", "expected"), [
    ("two\n\n  lines\r\n\tof it", "two lines of it"),
    (r"\"a\" \u00e9\u00e9 \ud83d\ude00 \\ \/ \n\r\t end", '"a" éé 😀 / end'),
    (r"\\\"a\\\" \\u003cb\\u003e \\n\\n", '"a" <b> '),
    (r"it\'s \xa0\u200b \U000e0001", "it's \u200b \U000e0001"),
    ("R&amp;D &lt;b&gt; &quot;&#34; &#39;&#x27;&apos; & &nbsp;", "R&D <b> \"\" ''' & &nbsp;"),
    ("&amp;amp;lt; &amp;lt; \\u0026lt;", "< < <"),
    (r"\theta \section \\section", " heta section section"),
    ("", ""),
])  # fmt: skip
def test_examples(written: str, expected: str) -> None:
    assert Bare(written).text == expected


@given(TEXTS, st.lists(st.sampled_from(sorted(WRITERS)), min_size=1, max_size=3))
@settings(max_examples=500, deadline=None)
def test_whoever_writes_it_the_form_is_the_same(text: str, writers: list[str]) -> None:
    written = f"<{text}>"  # in quotes, or with what a writer adds, the bare form is in the middle
    for name in writers:
        written = WRITERS[name](written)
    assert bare(f"<{text}>") in Bare(written).text


@given(TEXTS, st.data())
@settings(max_examples=300, deadline=None)
def test_characters_are_found_again(text: str, data: st.DataObject) -> None:
    form = Bare(text)
    places = [(form.start(at), form.stop(at + 1)) for at in range(len(form.text))]
    assert all(start < stop for start, stop in places)
    assert all(stop <= start for (_, stop), (start, _) in zip(places, places[1:], strict=False))
    assert all(
        Bare(text[start:stop]).text == char
        for (start, stop), char in zip(places, form.text, strict=True)
    )
    for (_, stop), (start, _) in zip(places, places[1:], strict=False):
        assert set(text[stop:start]) <= {"\\"}


@given(TEXTS, st.lists(st.sampled_from(sorted(WRITERS)), max_size=3))
@settings(max_examples=500, deadline=None)
def test_whoever_writes_a_text_it_is_that_text(text: str, writers: list[str]) -> None:
    written = f"begins {text} ends"
    for name in writers:
        written = WRITERS[name](written)
    body = f"begins {text} ends"
    form = Bare(body).text
    at = Bare(written)
    start = at.text.index(form)
    assert is_written_as(body, written[at.start(start) : at.stop(start + len(form))])


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("it matches d+ and w*", r"it matches \d+ and \w*"),
        (r"it matches \d+ and \w*", "it matches d+ and w*"),
        (r"a tab is \t here", "a tab is \t here"),
        ("R&D and more", "R&amp;D &amp; more"),
        ("one two", "onetwo"),
    ],
)
def test_one_bare_form_is_not_one_text(body: str, written: str) -> None:
    assert not is_written_as(body, written)
    assert is_written_as(body, body) and is_written_as(written, written)
