"""Documents from elsewhere: no file hangs, fills the memory, or keeps others from being read."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from multiprocessing import active_children
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.ingest.documents import read_document
from samkv_integrations.ingest.reader import DocumentReader, ReadLimits
from tests.support.processes import wait_until

GOOD = "<html><body><p>The mill stands by the river.</p></body></html>"
LIMITS = ReadLimits(file_bytes=20 * 10**6, text_bytes=10**6, seconds=4.0, memory_bytes=700 * 10**6)


def pdf_of(objects: list[bytes], path: Path) -> None:
    """A PDF of these objects, whose first one is the catalogue."""
    body, places = b"%PDF-1.7\n", list[int]()
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    n_objects, start = len(objects) + 1, len(body)
    path.write_bytes(
        body + b"xref\n0 %d\n0000000000 65535 f \n%s" % (n_objects, table)
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (n_objects, start)
    )  # fmt: skip


def stream(content: bytes, *, times: int = 1, more: bytes = b"") -> bytes:
    for _ in range(times):
        content = zlib.compress(content, 9)
    filters = b"[" + b" /FlateDecode" * times + b" ]"
    return b"<< /Length %d /Filter %s %s >>\nstream\n%s\nendstream" % (
        len(content), filters, more, content,
    )  # fmt: skip


def page_of(content: bytes, path: Path, *more: bytes, resources: bytes = b"") -> None:
    pages = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R /Resources << "
        + resources + b" >> >>"
    )  # fmt: skip
    pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", pages, page, content, *more], path)


def of_itself(folder: Path) -> Path:
    """A page tree whose node is its own child."""
    path = folder / "itself.pdf"
    tree = b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 /Parent 2 0 R >>"
    pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", tree], path)
    return path


def many_states(folder: Path) -> Path:
    path = folder / "states.pdf"
    page_of(stream(b"q " * 2_000_000), path)
    return path


def compressed_twice(folder: Path) -> Path:
    path = folder / "twice.pdf"
    page_of(stream(b" " * 300_000_000, times=2), path)
    return path


def nested_forms(folder: Path) -> Path:
    """Form objects, each of which draws the next one ten times."""
    path, depth = folder / "forms.pdf", 10
    forms = []
    for number in range(depth):
        draws, names = b"/F Do " * 10, b"/XObject << /F %d 0 R >>" % (6 + number)
        about = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << %s >>" % names
        forms.append(stream(draws if number < depth - 1 else b"", more=about))
    page_of(stream(b"/F Do " * 10), path, *forms, resources=b"/XObject << /F 5 0 R >>")
    return path


def docx(path: Path, paragraphs: Iterable[str]) -> Path:
    """A Word document, the parts of whose paragraphs' XML are given."""
    name = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    with ZipFile(path, "w", ZIP_DEFLATED) as file:
        file.writestr("[Content_Types].xml", "<Types/>")
        file.writestr("_rels/.rels", "<Relationships/>")
        with file.open("word/document.xml", "w", force_zip64=True) as part:
            part.write(f'<w:document xmlns:w="{name}"><w:body>'.encode())
            for each in paragraphs:
                part.write(each.encode())
            part.write(b"</w:body></w:document>")
    return path


def docx_of_spaces(folder: Path) -> Path:
    spaces = repeat(" " * 1_000_000, 400)
    return docx(folder / "spaces.docx", chain(["<w:p><w:r><w:t>"], spaces, ["</w:t></w:r></w:p>"]))


def wide_csv(folder: Path) -> Path:
    path = folder / "wide.csv"
    path.write_text(",".join(map(str, range(200_000))) + "\n" + "x," * 199_999 + "x\n")
    return path


def deep_html(folder: Path) -> Path:
    path = folder / "deep.html"
    path.write_text("<div>" * 200_000 + "deep" + "</div>" * 200_000)
    return path


def unicode_range(folder: Path) -> Path:
    """A font whose codes are mapped to characters, all four billion of them."""
    path = folder / "range.pdf"
    table = b"1 begincodespacerange <00000000> <FFFFFFFF> endcodespacerange 1 beginbfrange "
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >>"
    text = stream(b"BT /F 9 Tf (The mill) Tj ET")
    mapped = stream(table + b"<00000000> <FFFFFFFF> <0000> endbfrange")
    page_of(text, path, font, mapped, resources=b"/Font << /F 5 0 R >>")
    return path


def scattered_characters(folder: Path) -> Path:
    path = folder / "scattered.pdf"
    places = ((at * 7919 % 997, at * 104_729 % 991) for at in range(300_000))
    text = b"".join(b"1 0 0 1 %d %d Tm (a) Tj " % place for place in places)
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    page_of(stream(b"BT /F 9 Tf " + text + b"ET"), path, font, resources=b"/Font << /F 5 0 R >>")
    return path


def docx_of_paragraphs(folder: Path) -> Path:
    return docx(folder / "paragraphs.docx", ["<w:p><w:r><w:t>a</w:t></w:r></w:p>" * 300_000])


def workbook(path: Path, sheet: Iterable[str]) -> None:
    """A workbook with one sheet, the parts of whose XML are given."""
    office = "http://schemas.openxmlformats.org"
    main, of_office = f"{office}/spreadsheetml/2006/main", f"{office}/officeDocument/2006"
    package = f"{office}/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/sheet.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{of_office}/relationships/officeDocument" Target="xl/workbook.xml"/>'
        "</Relationships>",
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{of_office}/relationships"><sheets>'
        '<sheet name="Places" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{of_office}/relationships/worksheet" Target="sheet.xml"/>'
        "</Relationships>",
    }
    with ZipFile(path, "w", ZIP_DEFLATED) as file:
        for name, text in parts.items():
            file.writestr(name, text)
        with file.open("xl/sheet.xml", "w", force_zip64=True) as part:
            part.write(f'<worksheet xmlns="{main}">'.encode())
            for text in sheet:
                part.write(text.encode())
            part.write(b"</worksheet>")


CELL = '<c t="inlineStr" r="{}"><is><t>mill</t></is></c>'


def workbook_of_spaces(folder: Path) -> Path:
    path, space = folder / "spaces.xlsx", " " * 1_000_000
    inside = ('<sheetData><row r="1"><c t="inlineStr" r="A1"><is><t>', *[space] * 400)
    workbook(path, (*inside, "</t></is></c></row></sheetData>"))
    return path


def workbook_of_no_cells(folder: Path) -> Path:
    """It declares all cells that a sheet may have, and has the last one of the last row."""
    path = folder / "declared.xlsx"
    last = CELL.format("XFD1048576")
    data = f'<sheetData><row r="1048576">{last}</row></sheetData>'
    workbook(path, ['<dimension ref="A1:XFD1048576"/>', data])
    return path


def book_of_spaces(folder: Path) -> Path:
    path, space = folder / "spaces.epub", b"word " * 200_000
    with ZipFile(path, "w", ZIP_DEFLATED) as file:
        file.writestr(
            "META-INF/container.xml",
            '<container><rootfiles><rootfile full-path="a.opf"/></rootfiles></container>',
        )
        file.writestr(
            "a.opf",
            '<package><manifest><item id="a" href="a.xhtml"/></manifest>'
            '<spine><itemref idref="a"/></spine></package>',
        )
        with file.open("a.xhtml", "w", force_zip64=True) as part:
            part.write(b"<html><body><p>")
            for _ in range(400):
                part.write(space)
            part.write(b"</p></body></html>")
    return path


def nested_mail(folder: Path) -> Path:
    path = folder / "nested.eml"
    parts = (f"Content-Type: multipart/mixed; boundary=b{at}\n\n--b{at}\n" for at in range(1000))
    path.write_text("Subject: nested\n" + "".join(parts) + "\nThe mill\n")
    return path


def nested_notebook(folder: Path) -> Path:
    path = folder / "nested.ipynb"
    path.write_text('{"cells": ' + "[" * 100_000 + "]" * 100_000 + "}")
    return path


def nested_json(folder: Path) -> Path:
    path = folder / "nested.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    return path


def one_line(folder: Path) -> Path:
    path = folder / "line.jsonl"
    path.write_text('{"text": "' + "word " * 10_000_000 + '"}\n')
    return path


def all_characters(folder: Path) -> Path:
    """Text in UTF-8 with each character that there is, but for two bytes."""
    path = folder / "characters.txt"
    known = (*range(0x80, 0xD800), *range(0xE000, 0x110000))
    path.write_bytes("".join(map(chr, known)).encode() + b"\xff\xff")
    return path


def sparse_text(folder: Path) -> Path:
    path = folder / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(2 * 2**30)
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[DocumentReader]:
    with DocumentReader.opened(LIMITS) as made:
        yield made


@pytest.mark.parametrize(
    "write",
    [
        of_itself, many_states, compressed_twice, nested_forms, docx_of_spaces, wide_csv,
        deep_html, sparse_text, unicode_range, scattered_characters, docx_of_paragraphs,
        workbook_of_spaces, workbook_of_no_cells, book_of_spaces, nested_mail, nested_notebook,
        nested_json, one_line, all_characters,
    ],
)  # fmt: skip
def test_a_hostile_file_is_read_or_named_and_the_next_one_is_read(
    write: Callable[[Path], Path], reader: DocumentReader, tmp_path: Path
) -> None:
    (tmp_path / "good.html").write_text(GOOD)
    file, began = write(tmp_path), time.monotonic()
    try:
        found = reader.read(file)
    except InvalidOption as error:
        assert str(file) in str(error)
    else:
        assert len(found.text.encode()) <= LIMITS.text_bytes
    assert time.monotonic() - began < LIMITS.seconds + 30

    def next_is_read() -> bool:
        with suppress(InvalidOption):  # on a busy machine a new process may start too slowly
            return "mill" in reader.read(tmp_path / "good.html").text
        return False

    wait_until(next_is_read, "the next file is read")


def test_the_limit_that_is_exceeded_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.html").write_text("<p>" + "word " * 10_000)
    (tmp_path / "long.txt").write_text("word " * 10_000)
    few = ReadLimits(file_bytes=60_000, text_bytes=40_000)
    with DocumentReader.opened(few) as reader:
        for name in ("long.html", "long.txt"):
            with pytest.raises(InvalidOption, match=f"{name} holds .* 40000 are .*--max-text"):
                reader.read(tmp_path / name)
        (tmp_path / "long.txt").write_text("word " * 20_000)
        with pytest.raises(InvalidOption, match="100000 bytes, and 60000 are .*--max-file"):
            reader.read(tmp_path / "long.txt")
    with DocumentReader.opened(ReadLimits(seconds=0.01)) as reader:
        with pytest.raises(InvalidOption, match=r"more than 0\.01 seconds .*--read-seconds"):
            reader.read(tmp_path / "long.html")
    with DocumentReader.opened(ReadLimits(memory_bytes=1)) as reader:
        with pytest.raises(InvalidOption, match="more than 1 bytes of memory.*--read-memory"):
            reader.read(tmp_path / "long.html")


def test_a_pdf_of_too_many_pages_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pages.pdf"
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] >>"
    tree = b"<< /Type /Pages /Kids [3 0 R 4 0 R 5 0 R] /Count 3 >>"
    pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", tree, page, page, page], file)
    with DocumentReader.opened(ReadLimits(pages=2)) as reader:
        with pytest.raises(InvalidOption, match=r"pages\.pdf has 3 pages, and 2 .*--max-pages"):
            reader.read(file)
    with DocumentReader.opened(ReadLimits(pages=3)) as reader:
        assert len(reader.read(file).pages) == 3


def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(GOOD)
    of_others = {*active_children()}
    with DocumentReader.opened(LIMITS) as reader:
        assert "mill" in reader.read(tmp_path / "good.html").text
        (process,) = {*active_children()} - of_others
        process.kill()
        process.join()
        assert "mill" in reader.read(tmp_path / "good.html").text
        (process,) = {*active_children()} - of_others
    assert not process.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="shows what a process has loaded")
def test_reading_loads_nothing_that_reports_over_the_network(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(GOOD)
    of_others = {*active_children()}
    with DocumentReader.opened(LIMITS) as reader:
        reader.read(tmp_path / "good.html")
        (process,) = {*active_children()} - of_others
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert "numpy" in loaded and "onnxruntime" not in loaded


TEXT = "Größe und Preis: 5 € für zwei Stück.\nLe café coûte 3 € à l’hôtel."


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", TEXT), ("utf-8-sig", TEXT), ("utf-16", TEXT), ("utf-32", TEXT),
        ("cp1252", TEXT), ("cp1252", "El niño comió piñas y mañana irá a España."),
        ("latin-1", "Die Straße ist schön."),
        ("cp1251", "Привет, как дела? Сегодня хорошая погода в Москве."),
        ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy."),
        ("cp1250", "Statek przepływa cieśninę. Żółw idzie łąką, gdzie są róże i ściany."),
        ("gb18030", "渡轮四十分钟穿过海峡。\n" * 12_000),
        ("shift_jis", "東京は日本の首都です。人口は千四百万人です。"),
    ],
)  # fmt: skip
def test_an_encoding_is_detected(encoding: str, text: str, tmp_path: Path) -> None:
    for suffix in (".txt", ".csv"):
        file = tmp_path / f"text{suffix}"
        file.write_bytes(text.encode(encoding))
        assert text.split()[0].strip(",") in read_document(file).text


def test_an_encoding_can_be_given_and_wrong_ones_are_named(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("ďábelské ódy".encode("cp1250"))
    assert read_document(file, encoding="cp1250").text == "ďábelské ódy"
    with pytest.raises(InvalidOption, match="text.txt cannot be read as ascii text"):
        read_document(file, encoding="ascii")
    file.write_bytes(os.urandom(4000))
    with pytest.raises(InvalidOption, match="cannot be read as"):
        read_document(file)


def test_what_is_nearly_utf_8_is_no_other_encoding(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes((TEXT * 20).encode() + b"\xff")
    with pytest.raises(InvalidOption, match="UTF-8 but for 1 bytes"):
        read_document(file)
    file.write_bytes("plain".encode("utf-16-le"))
    with pytest.raises(InvalidOption, match="NUL bytes"):
        read_document(file)
    file.write_bytes(b"\\ud800")
    with pytest.raises(InvalidOption, match="unicode_escape"):
        read_document(file, encoding="unicode_escape")
    file.write_bytes(TEXT.encode("utf-8-sig"))
    assert read_document(file, encoding="utf-8").text == TEXT


def test_a_page_declares_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    page = '<html><head><meta charset="windows-1251"></head><body>Привет, мир</body></html>'
    file.write_bytes(page.encode("cp1251"))
    assert "Привет, мир" in read_document(file).text
