"""Documents that are not text: what is read, where it stands, and what cannot be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from zipfile import ZipFile

import pytest

from samkv_integrations.chroma.client import open_collection
from samkv_integrations.errors import InvalidOption
from samkv_integrations.ingest.documents import UTF_8, read_document
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


def xlsx(path: Path) -> None:
    from openpyxl import Workbook

    made = Workbook()
    made.active.append(["place", "says"])
    made.active.append(["mill | wheel", MILL, None])
    made.create_sheet("Bakery").append([None, 3, BAKER])
    made.save(path)


def eml(path: Path) -> None:
    made = EmailMessage()
    made["Subject"], made["From"] = "The mill", "Größe <miller@example.org>"
    made.set_content(f"{MILL}\n\nBest wishes")
    made.add_alternative("<p>secret</p>", subtype="html")
    made.add_attachment(b"secret", maintype="image", subtype="png", filename="wheel.png")
    path.write_bytes(bytes(made))


def epub(path: Path) -> None:
    parts = {
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="b/a.opf"/>'
        "</rootfiles></container>",
        "b/a.opf": '<package xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
        '<dc:title>The mill</dc:title></metadata><manifest><item id="a" href="a.xhtml"/>'
        '</manifest><spine><itemref idref="a"/></spine></package>',
        "b/a.xhtml": f"<html><body><p>{MILL}</p><script>secret</script></body></html>",
    }
    with ZipFile(path, "w") as file:
        for name, text in parts.items():
            file.writestr(name, text)


def ipynb(path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# The mill\n", MILL]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": "secret"}]},
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))


def rst(path: Path) -> None:
    path.write_text(f"The mill\n========\n\n{MILL}\n")


def jsonl(path: Path) -> None:
    path.write_text(json.dumps({"text": MILL}) + "\n")


@pytest.mark.parametrize("write", [pdf, docx, html, pptx, csv, xlsx, eml, epub, ipynb, rst, jsonl])
def test_each_kind_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / f"file.{write.__name__.upper()}"
    write(file)
    found = read_document(file)
    assert MILL in found.text and "secret" not in found.text
    assert len(found.pages) == (2 if write is pdf else 1)
    if write is pdf:
        assert BAKER in found.pages[1]
    if write in (html, eml, epub, ipynb):
        assert found.title == "The mill"
    if write in (html, eml):
        assert "Größe" in found.text
    if write is eml:
        assert "Attachments, not read: wheel.png" in found.text
    if write is xlsx:
        assert f"| mill \\| wheel | {MILL} |\n" in found.text and "## Bakery" in found.text


def test_a_mail_without_a_plain_body_is_read(tmp_path: Path) -> None:
    made = EmailMessage()
    made.set_content(f"<html><body><h1>News</h1><p>{MILL}</p></body></html>", subtype="html")
    (tmp_path / "a.eml").write_bytes(bytes(made))
    assert read_document(tmp_path / "a.eml").text.strip() == f"# News\n\n{MILL}"
    (tmp_path / "c.eml").write_bytes(b"")
    assert read_document(tmp_path / "c.eml").text.strip() == ""


GRIND = "Die Mühle mahlt für alle Dörfer, und für die Städte."


@pytest.mark.parametrize(
    "head",
    [
        "", "Content-Type: text/plain", "Content-Type: text/plain; charset=us-ascii",
        "Content-Type: text/plain; charset=nowhere", "Content-Type: text/plain; charset=undefined",
        "Content-Type: text/plain; charset=", "Content-Type: text/plain; charset=rot13",
        "Content-Type: text/markdown; charset=idna", "Content-Type: multipart/mixed",
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_mail_that_does_not_tell_its_encoding_is_read_in_a_likely_one(
    tmp_path: Path, head: str, encoding: str
) -> None:
    path = tmp_path / "a.eml"
    path.write_bytes(f"Subject: Mill\n{head}".strip().encode() + b"\n\n" + GRIND.encode(encoding))
    read = read_document(path)
    assert read.text == f"Subject: Mill\n\n{GRIND}"
    assert read.encoding == (encoding if encoding == "cp1252" else UTF_8)


def test_mail_is_read_in_the_given_encoding_if_it_tells_none(tmp_path: Path) -> None:
    path = tmp_path / "a.eml"
    for head in ("charset=nowhere", "charset=latin-1"):
        path.write_bytes(f"Content-Type: text/plain; {head}\n\n".encode() + b"\xe9t\xe9")
        read = read_document(path, encoding="koi8-r")
        told = ("été", UTF_8) if "latin" in head else ("\u0418t\u0418", "koi8-r")
        assert (read.text.strip(), read.encoding) == told
    path.write_bytes(b"Content-Type: text/plain; charset=nowhere\n\n\0\xff")
    with pytest.raises(InvalidOption, match="a.eml cannot be read as text: it holds NUL bytes"):
        read_document(path)
    path.write_bytes(b"From: " + b"<(" * 20_000 + b"\nSubject: Mill\n\nThe mill")
    assert read_document(path).text == "Subject: Mill\n\nThe mill"


def test_half_characters_are_replaced(tmp_path: Path) -> None:
    ipynb(tmp_path / "a.ipynb")
    text = (tmp_path / "a.ipynb").read_text().replace("print(1)", "\\ud800")
    (tmp_path / "a.ipynb").write_text(text)
    assert "```python\n?\n```" in read_document(tmp_path / "a.ipynb").text


def test_an_error_without_words_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BadPart(Exception):
        pass

    def refuse(*_: object) -> None:
        raise BadPart

    monkeypatch.setattr("markitdown.converters.DocxConverter.convert", refuse)
    file = tmp_path / "bad.docx"
    file.write_bytes(b"PK")
    with pytest.raises(InvalidOption, match=r"cannot be read as \.docx \(BadPart\)"):
        read_document(file)


@pytest.mark.parametrize(
    "suffix", [".pdf", ".docx", ".pptx", ".html", ".csv", ".xlsx", ".eml", ".epub", ".ipynb"]
)
@pytest.mark.parametrize("content", [b"no document", b"PK\x03\x04\xff\xfe", b"\x00\xff" * 500, b""])
def test_what_is_damaged_is_named_or_is_text(suffix: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"bad{suffix}"
    file.write_bytes(content)
    try:
        read_document(file)
    except InvalidOption as error:
        assert f"bad{suffix} cannot be read as" in str(error)
    else:
        assert suffix in (".html", ".csv", ".eml")


def test_a_name_of_several_lines_forges_none(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "good.md").write_text(MILL)
    (tmp_path / "docs" / "bad\nskipped good.pdf").write_bytes(b"no document")
    result = run("ingest", str(tmp_path / "docs"), "--model", tiny)
    assert "bad\ufffdskipped good.pdf: it cannot be read" in result.stderr
    assert "\nskipped good" not in result.stderr


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
    result = run("ingest", str(folder), "--max-pages", "1")
    assert result.exit_code == 1 and "file.pdf: it has 2 pages, and 1 are" in result.stderr
    opened = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    assert opened.count() == len(places)  # a document that cannot be read keeps them
    assert "2 chunks deleted" in ran("store", "forget", str(folder / "file.pdf"))


def test_the_rows_of_a_table_in_a_pdf_stay_together_and_words_apart(tmp_path: Path) -> None:
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    rows = [["Port", "Depth", "Berths"], ["Birk", "5 m", "1"], ["Dal", "8 m", "2"]]
    with PdfPages(tmp_path / "table.pdf") as pages:
        for text in (MILL, BAKER):
            page = Figure()
            page.text(0.1, 0.9, text)
            for number, row in enumerate(rows):
                for column, cell in enumerate(row):
                    page.text(0.1 + 0.3 * column, 0.7 - 0.1 * number, cell)
            pages.savefig(page)
    found = read_document(tmp_path / "table.pdf").pages
    table = ["Port Depth Berths", "Birk 5 m 1", "Dal 8 m 2"]
    assert [page.split("\n") for page in found] == [[MILL, *table], [BAKER, *table]]


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
