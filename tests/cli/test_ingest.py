"""``samkv ingest``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.chroma.client import Database, open_collection
from samkv_integrations.chroma.link import Adding, ChromaLink
from samkv_integrations.errors import InvalidOption
from samkv_integrations.ingest import splitting
from samkv_integrations.ingest.cluster import ClusterIngest
from samkv_integrations.ingest.finding import Found, find_documents
from samkv_integrations.ingest.splitting import split
from samkv_integrations.runtimes.transformers.loading import load_model
from tests.cli.running import error_of, ran, rows_of, run
from tests.support.records import RECORDS


def test_ingest_prefills_once(town: Path) -> None:
    result = run("ingest", str(town))
    shown = result.stdout
    assert "6 files, 6 chunks" in shown and "6 prefilled by builtin, 0 already cached" in shown
    assert "tokens/s" not in result.stderr  # it is no terminal
    assert "0 prefilled by builtin, 6 already cached" in ran("ingest", str(town))
    (row,) = rows_of("ingest", str(town))
    assert (row["files"], row["n_records"], row["n_cached"], row["n_hit"]) == (6, 6, 0, 6)
    assert row["bytes_on_disk"] == 0 and row["seconds"] > 0
    (held,) = rows_of("store", "stats")
    assert (held["model"], held["chunks"]) == ("builtin", 6)
    assert held["bytes"] > 0
    assert "6 chunks" in ran("store", "stats")


def test_another_model_takes_over_a_collection(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny, "--dtype", "float32")
    assert "6 already cached" in ran("ingest", str(town))
    assert "6 prefilled by builtin" in ran("ingest", str(town), "--model", "builtin")
    assert json.loads(ran("ask", "Who?", "--json"))["model"] == "builtin"
    result = run("ingest", str(town / "krasplex-systems.txt"), "--model", tiny)
    assert "the other documents" in result.stderr and "samkv store sync" in result.stderr
    assert "1 replaced cache deleted" in result.stdout


def test_the_model_of_a_deleted_cache_folder_is_asked_for(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    shutil.rmtree(".samkv/kv")
    for command in (["ask", "Who?"], ["ingest", str(town)]):
        assert "give it with --model" in error_of(*command)
    assert json.loads(ran("ask", "Who?", "--model", tiny, "--json"))["model"] == tiny


@pytest.fixture
def pages_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are cached two by two, as they are read."""
    monkeypatch.setattr("samkv_integrations.ingest.chunks.PAGE_SIZE", 2)


def fails_after(times: int, function: Callable[..., Any], error: BaseException) -> Any:
    """The function, which raises when it was called so many times."""
    calls = iter(range(times))

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return function(*arguments, **options)

    return wrapped


@pytest.mark.usefixtures("pages_of_two")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvalidOption("no room")])
@pytest.mark.parametrize("where", ["reading", "caching"])
def test_what_is_cached_before_an_end_stays(
    where: str, error: BaseException, town: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if where == "reading":  # the fifth file
            split = fails_after(4, splitting.split, error)
            patched.setattr("samkv_integrations.ingest.chunks.split", split)
        else:  # the third page
            patched.setattr(Adding, "write", fails_after(2, Adding.write, error))
        ended = run("ingest", str(town), "--model", tiny)
    if isinstance(error, KeyboardInterrupt):
        assert "interrupted; caches made so far stay" in ended.stderr and ended.exit_code == 130
    else:
        assert "samkv: no room" in ended.stderr and ended.exit_code == 2
    assert rows_of("store", "sync")[0]["n_records"] == 4
    assert f"2 prefilled by {tiny}, 4 already cached" in ran("ingest", str(town))


_KILLED = """
import os, signal, sys
from samkv_integrations.chroma.link import Adding
from samkv_integrations.cli.app import app
from samkv_integrations.ingest import chunks

chunks.PAGE_SIZE = 2
write = Adding.write

def killed(*arguments, **options):
    write(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)

Adding.write = killed
app(sys.argv[1:])
"""


def test_after_a_killed_ingest_no_command_asks_for_its_model(town: Path, tiny: str) -> None:
    ingest = [sys.executable, "-c", _KILLED, "ingest", str(town), "--model", tiny]
    assert subprocess.run(ingest, check=False, timeout=120).returncode == -signal.SIGKILL
    (synced,) = rows_of("store", "sync")
    assert synced["n_records"] == 2
    assert f"4 prefilled by {tiny}, 2 already cached" in ran("ingest", str(town))


def test_a_new_collection_is_of_the_folders_model(town: Path, tiny: str) -> None:
    one = str(town / "krasplex-systems.txt")
    ran("ingest", one, "--model", tiny)
    found = json.loads(ran("ingest", one, "--collection", "two", "--json"))
    assert found["model"] == tiny
    ran("ingest", one, "--model", "builtin", "--collection", "built")
    line = error_of("ingest", one, "--collection", "third")
    assert "give one with --model" in line


def test_ingest_splits_long_documents_and_forgets_what_they_no_longer_say(
    tiny: str, working_folder: Path
) -> None:
    file = working_folder / "long.md"
    file.write_text("\n\n".join(f"# Part {n}\n\n" + "Some words here. " * 9 for n in range(5)))
    (row,) = rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    collection = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    texts = collection.get(include=["documents"])["documents"]
    assert len(texts) == row["n_records"] > 5
    assert max(len(text.encode()) for text in texts) <= 100  # one token a byte
    file.write_text("Short now.")
    rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    assert collection.get(include=["documents"])["documents"] == ["Short now."]


@pytest.mark.usefixtures("pages_of_two")
def test_a_repeated_text_was_not_cached_before(tiny: str, working_folder: Path) -> None:
    Path("docs").mkdir()
    for name in ("a", "b", "c"):
        Path(f"docs/{name}.txt").write_text("The same text in every one of these files.")
    first = ran("ingest", "docs", "--model", tiny)
    assert "3 files, 3 chunks" in first
    assert f"1 prefilled by {tiny}, 0 already cached, 2 repeated\n" in first
    assert f"0 prefilled by {tiny}, 3 already cached\n" in ran("ingest", "docs")


@pytest.mark.parametrize("kind", [".md", ".txt"])
def test_a_heading_stays_with_the_text_that_follows(kind: str, tiny: str) -> None:
    """Also before a paragraph or a list that is longer than a chunk, and short ends join."""
    model = load_model(tiny)  # one token a byte
    long, most = "Some words here. " * 40, 200
    page = f"Before.\n\n# A\n\n## B\n\n{long}\n\n## C\n\n{long}\n\n### D\n\n" + "* item\n" * 60
    chunks = split(page.strip(), kind, model, most)
    assert "".join("".join(chunks).split()) == "".join(page.split())
    assert all(25 <= len(chunk) <= most for chunk in chunks)
    for heading in ("## B", "## C", "### D"):
        (chunk,) = (chunk for chunk in chunks if heading in chunk.splitlines())
        assert len(chunk) - chunk.index(heading) > 50


def test_ingest_leaves_its_own_folder_and_hidden_files_out(town: Path) -> None:
    (town / ".hidden.txt").write_text("Nobody shall read this.")
    rows_of("ingest", str(town), "--dir", str(town / "kept"))
    (town / "kept/notes.txt").write_text("Something that was put there.")
    (row,) = rows_of("ingest", str(town), "--dir", str(town / "kept"))
    assert row["files"] == 6


def test_a_document_is_the_same_by_whatever_path(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran("ingest", "town", "--dir", "kept")
    monkeypatch.chdir(town)
    ran("ingest", ".", "--dir", "../kept")
    collection = open_collection(town.parent / "kept/chroma", "documents", create=False)
    assert collection.count() == len(RECORDS)


def test_chunks_longer_than_the_context_window(working_folder: Path, tiny: str) -> None:
    (working_folder / "long.txt").write_text("words " * 500)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "5000")
    assert "room for 1797 at most" in line
    assert "2 chunks" in ran("ingest", "long.txt", "--model", tiny, "--chunk-size", "1797")


def test_a_long_document_without_the_splitter(
    working_folder: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "semantic_text_splitter", None)
    (working_folder / "long.txt").write_text("words " * 100)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "100")
    assert "pip install '.[chroma]'" in line


class TestWhatIsNotRead:
    """Files of a folder that are left out, and named."""

    def skipped(self, *arguments: str, code: int) -> dict[str, str]:
        result = run("ingest", *arguments, "--json")
        assert result.exit_code == code, result.output
        (row,) = json.loads(result.stdout)["rows"]
        assert row["files"] == len(RECORDS)
        lines = [line for line in result.stderr.splitlines() if line.startswith("skipped ")]
        assert len(lines) == len(row["skipped"])
        for one in row["skipped"]:
            assert any(one["why"] in line for line in lines)
        return {Path(one["path"]).name: one["why"] for one in row["skipped"]}

    def test_links_are_not_followed(self, town: Path, tiny: str, working_folder: Path) -> None:
        outside = working_folder / "outside"
        outside.mkdir()
        (outside / "secret.txt").write_text("The password of Tobias is swordfish.")
        (town / "a-link.txt").symlink_to(outside / "secret.txt")
        (town / "to-a-file-beside-it.txt").symlink_to(town / "krasplex-systems.txt")
        (town / "deep").mkdir()
        (town / "deep/folder").symlink_to(outside)
        (town / "nowhere.md").symlink_to("gone.md")
        (town / "picture.png").symlink_to(outside / "secret.txt")
        found = self.skipped(str(town), "--model", tiny, code=0)
        assert set(found) == {"a-link.txt", "to-a-file-beside-it.txt", "folder", "nowhere.md"}
        assert all("symbolic link" in why for why in found.values())
        opened = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
        assert "swordfish" not in str(opened.get())

    def test_what_is_named_may_be_a_link(self, town: Path, tiny: str, working_folder: Path) -> None:
        (working_folder / "folder").symlink_to(town)
        (working_folder / "one.txt").symlink_to(town / "krasplex-systems.txt")
        shown = ran("ingest", "folder", "one.txt", str(town), "--model", tiny)
        assert f"{len(RECORDS)} files" in shown  # each once

    def test_a_link_that_takes_the_place_of_a_file(
        self, town: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, working_folder: Path
    ) -> None:
        """Between looking and reading."""
        target = working_folder / "secret.md"
        target.write_text("swordfish")

        def find_and_swap(*arguments: Any, **options: Any) -> Found:
            found = find_documents(*arguments, **options)
            (town / "krasplex-systems.txt").unlink()
            (town / "krasplex-systems.txt").symlink_to(target)
            return found

        monkeypatch.setattr("samkv_integrations.cli.ingest.find_documents", find_and_swap)
        result = run("ingest", str(town), "--model", tiny)
        assert result.exit_code == 1 and "krasplex-systems.txt: it cannot be read" in result.stderr
        opened = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
        assert "swordfish" not in str(opened.get())

    def test_pipes_and_folders(self, town: Path, tiny: str) -> None:
        os.mkfifo(town / "pipe.txt")
        (town / "folder.md").mkdir()
        found = self.skipped(str(town), "--model", tiny, code=0)
        assert found == {"pipe.txt": "it is not a regular file"}
        assert "a regular file" in error_of("ingest", str(town / "pipe.txt"), "--model", tiny)

    def test_other_encodings_are_detected_and_named(self, town: Path, tiny: str) -> None:
        (town / "latin.txt").write_bytes("Größe".encode("latin-1"))
        result = run("ingest", str(town), "--model", tiny)
        assert result.exit_code == 0 and "1 cp1252; --encoding names another" in result.stderr
        opened = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
        assert "Größe" in str(opened.get()["documents"])
        line = error_of("ingest", str(town / "latin.txt"), "--model", tiny, "--encoding", "utf-8")
        assert "none of 1 document can be read" in line and "as UTF-8 text" in line
        assert "one that Python knows" in error_of("ingest", str(town), "--encoding", "utf-9")

    def test_what_is_no_text_does_not_stop_the_others(self, town: Path, tiny: str) -> None:
        (town / "binary.txt").write_bytes(bytes(range(256)) * 20)
        found = self.skipped(str(town), "--model", tiny, code=1)
        assert "cannot be read as text" in found["binary.txt"]
        (town / "binary.txt").write_bytes(b"text " * 1000)
        found = self.skipped(str(town), "--model", tiny, "--max-file", "4kB", code=1)
        assert "has 5000 bytes, and 4000 are allowed at most" in found["binary.txt"]
        line = error_of("ingest", str(town), "--max-file", "much")
        assert "max_file" in line.replace("-", "_") and "20GB" in line

    @pytest.mark.parametrize("is_named", [False, True])
    def test_a_name_that_is_not_utf_8(self, town: Path, tiny: str, is_named: bool) -> None:
        file = os.fsdecode(os.fsencode(town) + b"/\xff.txt")
        Path(file).write_text("Some text.")
        named = [file] if is_named else []
        (why,) = self.skipped(str(town), *named, "--model", tiny, code=1).values()
        assert why == "its name is not UTF-8"

    def test_other_kinds_are_counted(self, town: Path, tiny: str) -> None:
        for name in ("a.png", "b.PNG", "Makefile"):
            (town / name).write_bytes(b"x")
        (town / "empty.txt").write_text(" ")
        result = run("ingest", str(town), "--model", tiny)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"{len(list(town.glob('*.txt'))) - 1} files, ")
        assert "other kinds were left out: 1 .jsonl, 2 .png, 1 Makefile; --code" in result.stderr
        assert "empty.txt: it holds no text" in result.stderr

    def test_of_many_kinds_the_most_frequent_are_told(self, town: Path, tiny: str) -> None:
        for number in range(300):
            (town / f"a.{number:03}").touch()
        (town / "b.007").touch()
        (town / f"c.{'long' * 50}").touch()
        (line,) = (
            line
            for line in run("ingest", str(town), "--model", tiny).stderr.splitlines()
            if "other kinds were" in line
        )
        assert "2 .007, " in line and line.endswith(
            " of 292 other kinds; --code reads source code and data, too"
        )
        assert len(line) < 300

    def test_source_code_is_read_if_it_is_named_or_asked_for(self, town: Path, tiny: str) -> None:
        (town / "questions.jsonl").unlink()
        (town / "a.py").write_text("def mill():\n    return 'by the river'\n")
        assert "6 files" in ran("ingest", str(town), "--model", tiny)
        assert "7 files" in ran("ingest", str(town), str(town / "a.py"), "--model", tiny)
        assert "7 files" in ran("ingest", str(town), "--code", "--model", tiny)
        Path("src").mkdir()
        (town / "a.py").rename("src/a.py")
        assert "or --code to read source code" in error_of("ingest", "src")

    def test_another_kind_that_is_named_does_not_stop_the_others(
        self, town: Path, tiny: str
    ) -> None:
        (town / "a.png").write_bytes(b"x")
        picture = str(town / "a.png")
        found = self.skipped(str(town), picture, "--model", tiny, code=1)
        assert "not a document; known kinds: .md, " in found["a.png"]
        assert "not a document" in error_of("ingest", picture, "--model", tiny)


def test_the_records_of_documents_that_are_all_emptied_go(town: Path, tiny: str) -> None:
    one = town / "krasplex-systems.txt"
    ran("ingest", str(one), "--model", tiny)
    one.write_text(" ")
    assert "no text in 1 document" in error_of("ingest", str(one), "--model", tiny)
    collection = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    assert collection.count() == 0
    assert rows_of("store", "stats") == []
    assert "no text" in error_of("ingest", str(one), "--collection", "new")
    names = Database(Path(".samkv/chroma")).names()
    assert names == ["documents"]


# -- on Ray, as far as it needs none ------------------------------------------------------------


def test_what_ray_writes_is_not_among_the_json(
    town: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells on standard output of a worker that was killed."""

    def noisy(link: ChromaLink, source: object, *records: Any, **options: object) -> ClusterIngest:
        sys.stdout.write("(raylet) Task MapWorker failed\n")
        return ClusterIngest(**asdict(link.add(*records)))

    monkeypatch.setattr("samkv_integrations.ingest.cluster.add_on_ray", noisy)
    (row,) = rows_of("ingest", str(town), "--model", tiny, "--ray")
    assert row["n_records"] == len(RECORDS)


def test_ray_is_an_extra(town: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = error_of("ingest", str(town), "--ray")
    assert "pip install '.[ray]'" in line
    assert not Path(".samkv").exists()


def test_a_refused_ingest_leaves_the_settings_of_before(town: Path, tiny: str) -> None:
    """Other bits are refused where other machines have the caches."""
    ran("ingest", str(town), "--model", tiny)
    ran("store", "push", "--remote", Path("usb").absolute().as_uri())
    assert "remote tier" in error_of("ingest", str(town), "--store-bits", "8")
    (row,) = rows_of("ask", RECORDS[0].question, "--method", "reuse")
    assert row["reused"] > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--model", "./nowhere"], "does not exist"),
        (["--chunk-size", "0"], "Invalid value for '--chunk-size'"),
        (["--chroma", "http://127.0.0.1:9"], "cannot be reached"),
        (["--worker-gpus", "0"], "--worker-gpus 0.0 has no effect without --ray"),
    ],
)
def test_what_is_refused(town: Path, given: list[str], says: str) -> None:
    assert says in error_of("ingest", str(town), *given)
    (row,) = rows_of("ingest", str(town))
    assert row["n_records"] == len(RECORDS)


def test_folders_in_folders_without_end(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(400):
        deep = deep / "a"
        deep.mkdir()
    (deep / "deep.txt").write_text("deep")
    (tmp_path / "top.txt").write_text("top")
    assert [file.name for file in find_documents([tmp_path]).files] == ["deep.txt", "top.txt"]


def test_what_cannot_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that may be listed and not entered."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    found = find_documents([tmp_path])
    assert [file.name for file in found.files] == ["b.txt"]
    (skipped,) = found.skipped
    assert skipped.is_failure and "Permission denied" in skipped.why


@pytest.mark.parametrize("kind", [".md", ".txt"])
@pytest.mark.parametrize("overlap", [1, 20, 100])
def test_neighbours_overlap(kind: str, overlap: int, tiny: str) -> None:
    model, most = load_model(tiny), 200  # one token a byte
    body = " ".join(f"w{number}" for number in range(600))
    chunks = split(body, kind, model, most, overlap)
    words = [chunk.split() for chunk in chunks]
    assert all(len(chunk) <= most for chunk in chunks) and {*chain(*words)} == {*body.split()}
    for before, after in pairwise(words):
        n_shared = sum(word in before for word in after)
        shared = " ".join(after[:n_shared])
        assert before[len(before) - n_shared :] == after[:n_shared]
        assert len(shared) <= overlap
        assert overlap < len(shared) + 6 or before == after[:n_shared]


def test_an_overlap_of_more_than_half_of_a_chunk_is_refused(town: Path, tiny: str) -> None:
    for overlap in ("-1", "51"):
        line = error_of("ingest", str(town), "--chunk-size", "100", "--overlap", overlap)
        assert f"--overlap={overlap}; it must be 0 to 50" in line
    (town / "long.txt").write_text("some words here " * 100)
    few, more = (
        rows_of("ingest", str(town), "--model", tiny, "--chunk-size", "100", "--overlap", overlap)
        for overlap in ("0", "50")
    )
    assert few[0]["n_records"] < more[0]["n_records"]


def test_a_long_text_is_split_in_parts_that_lose_nothing(tiny: str) -> None:
    model, body = load_model(tiny), "some words here, " * 20_000
    chunks = split(body.strip(), ".txt", model, 1000)
    assert " ".join(chunks) == body.strip()


def test_text_without_white_space_is_cut(tiny: str) -> None:
    model = load_model(tiny)
    body = "".join(chr(97 + at * at % 26) for at in range(30_000))
    assert "".join(split(body, ".md", model, 256)) == body
