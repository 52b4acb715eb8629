"""The folder of a run. A run that was stopped continues with the rows that its folder holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from filelock import FileLock

from samkv_integrations.cli.formatting import Row
from samkv_integrations.errors import InvalidOption

ROWS, RUN, LOCK = "rows.jsonl", "run.json", "lock"


class Journal:
    """The folder of a run: its settings, and a line for every row as soon as it is measured.

    ``rows`` holds the rows of this and of earlier processes under (question id, label).

    Raises InvalidOption if the folder belongs to a run of other settings, if another process
    measures into it, or if it is not writable.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rows: dict[tuple[str, str], Row] = {}
        self._out: TextIO | None = None
        with ExitStack() as opened:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                opened.enter_context(FileLock(folder / LOCK, timeout=0))
                self._claim(json.loads(json.dumps(settings)))
            except TimeoutError as error:
                raise InvalidOption(
                    f"another process measures into {folder}; wait for it, or name another folder "
                    "with --output"
                ) from error
            except OSError as error:
                raise InvalidOption(
                    f"{folder} cannot be written ({error}); name another"
                ) from error
            self._opened = opened.pop_all()

    def _claim(self, settings: Mapping[str, Any]) -> None:
        run, rows = self.folder / RUN, self.folder / ROWS
        if run.exists():
            self._refuse_other(settings, run)
            self._read(rows)
        elif rows.exists():
            raise InvalidOption(f"{self.folder} has {ROWS} but no {RUN}; name another folder")
        else:
            # so that a process that is killed here leaves no half of a file
            made = run.with_suffix(".tmp")
            made.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", "utf-8")
            made.replace(run)

    def _refuse_other(self, settings: Mapping[str, Any], run: Path) -> None:
        try:
            found = json.loads(run.read_text(encoding="utf-8"))
            differ = sorted(k for k in {*found, *settings} if found.get(k) != settings.get(k))
        except (ValueError, TypeError) as error:
            raise InvalidOption(f"{run} is broken ({error}); name another folder") from error
        if differ:
            raise InvalidOption(
                f"{self.folder} holds a run of another {', '.join(differ)}; name another folder "
                "with --output"
            )

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a process was killed while it wrote this line
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], start=1):
            try:
                row = json.loads(line)
                self.rows[row["id"], row["label"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidOption(
                    f"{path}, line {number} is broken ({error!r}); delete the line"
                ) from error

    def add(self, row: Row) -> None:
        """Keep a row, here and in the file."""
        if self._out is None:
            rows = (self.folder / ROWS).open("a", encoding="utf-8", newline="\n")
            self._out = self._opened.enter_context(rows)
        self._out.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
        self._out.flush()
        self.rows[row["id"], row["label"]] = row

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()
