"""Documents that are not text: what is read, where it stands, and what cannot be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from samkv_integrations.chroma.client import open_collection
from samkv_integrations.errors import InvalidOption
from samkv_integrations.ingest.documents import read_document
from tests.cli.running import ran, run

MILL = "The mill stands by the river, and its wheel is green."
BAKER = "The baker lives next door, and sells bread every morning."


def pdf(path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    with rc_context({"pdf.fonttype": 42}), PdfPages(path) as pages:
        for text in (MILL, BAKER):
            page = Figure()
            page.text(0.1, 0.8, text)
            pages.savefig(page)


def docx(path: Path) -> None:
    office = "http://schemas.openxmlformats.org"
    word = f"{office}/wordprocessingml/2006/main"
    types = f"{office}/package/2006/content-types"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{types}"><Override PartName="/word/document.xml" '
        f'ContentType="{kind}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{office}/package/2006/relationships"><Relationship '
        f'Id="r1" Type="{office}/officeDocument/2006/relationships/officeDocument" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body><w:p><w:r><w:t>{MILL}</w:t>'
        "</w:r></w:p></w:body></w:document>",
    }
    with ZipFile(path, "w") as file:
        for name, text in parts.items():
            file.writestr(name, text)


def html(path: Path) -> None:
    path.write_text(
        f"<html><head><title>The mill</title><script>x = 'secret'</script></head>"
        f"<body><h1>Mill</h1><p>{MILL}</p><p>Größe</p></body></html>",
        encoding="utf-8",
    )


def pptx(path: Path) -> None:
    from pptx import Presentation

    made = Presentation()
    slide = made.slides.add_slide(made.slide_layouts[1])
    slide.shapes.title.text = MILL
    made.save(str(path))


def csv(path: Path) -> None:
    path.write_text(f'place,says\nmill,"{MILL}"\n', encoding="utf-8")


@pytest.mark.parametrize("write", [pdf, docx, html, pptx, csv])
def test_each_kind_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / f"file.{write.__name__.upper()}"
    write(file)
    found = read_document(file)
    assert MILL in found.text and "secret" not in found.text
    assert len(found.pages) == (2 if write is pdf else 1)
    if write is pdf:
        assert BAKER in found.pages[1]
    if write is html:
        assert found.title == "The mill" and "Größe" in found.text


def test_an_error_without_words_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a PDF that is encrypted."""

    class PasswordIncorrect(Exception):
        pass

    def refuse(*_: object) -> None:
        raise PasswordIncorrect

    monkeypatch.setattr("markitdown.converters.PdfConverter.convert", refuse)
    file = tmp_path / "secret.pdf"
    file.write_bytes(b"%PDF-1.4")
    with pytest.raises(InvalidOption, match=r"cannot be read as \.pdf \(PasswordIncorrect\)"):
        read_document(file)


@pytest.mark.parametrize("suffix", [".pdf", ".docx", ".pptx", ".html", ".csv"])
@pytest.mark.parametrize("content", [b"no document", b"PK\x03\x04\xff\xfe", b"\x00\xff" * 500, b""])
def test_what_is_damaged_is_named_or_is_text(suffix: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"bad{suffix}"
    file.write_bytes(content)
    try:
        read_document(file)
    except InvalidOption as error:
        assert f"bad{suffix} cannot be read as" in str(error)
    else:
        assert suffix in (".html", ".csv")


def test_a_folder_of_documents(tmp_path: Path, tiny: str) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for write in (pdf, docx, html):
        write(folder / f"file.{write.__name__}")
    (folder / "bad.pdf").write_bytes(b"no document")
    result = run("ingest", str(folder), "--model", tiny, "--json")
    assert result.exit_code == 1, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["files"] == 3 and [Path(one["path"]).name for one in row["skipped"]] == ["bad.pdf"]
    records = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False).get()
    assert records["metadatas"] is not None
    places = {
        (Path(str(one["source"])).name, one.get("page"), one.get("title"))
        for one in records["metadatas"]
    }
    assert places == {
        ("file.pdf", 1, None), ("file.pdf", 2, None), ("file.docx", None, None),
        ("file.html", None, "The mill"),
    }  # fmt: skip
    assert "2 chunks deleted" in ran("store", "forget", str(folder / "file.pdf"))


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text(MILL)
    html(tmp_path / "docs/b.html")
    result = run("ingest", "docs", "--model", tiny)
    assert result.exit_code == 1 and "1 file, 1 chunk in" in result.stdout
    assert "pip install '.[documents]'" in " ".join(result.stderr.split())
