"""Text files of users."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from samkv_integrations.errors import InvalidOption


def read_text(path: Path) -> str:
    """The text of a regular file, without a byte order mark.

    Raises InvalidOption if it is something else, or cannot be read as UTF-8.
    """
    return _read(path, os.O_NONBLOCK)


def read_document(path: Path) -> str:
    """The text of a regular file that is found there now, and not what a link leads to.

    Raises InvalidOption if it is something else, or cannot be read as UTF-8.
    """
    return _read(path, os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(path: Path, flags: int) -> str:
    try:
        opener = lambda name, mode: os.open(name, mode | flags)  # noqa: E731
        with open(path, encoding="utf-8-sig", opener=opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidOption(f"{path} is no regular file; give a file that holds the text")
            return file.read()
    except FileNotFoundError as error:
        raise InvalidOption(f"{path} does not exist; give an existing file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} cannot be read as UTF-8 text ({error})") from error
