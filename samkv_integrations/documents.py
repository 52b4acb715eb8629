"""Text files of users."""

from __future__ import annotations

from pathlib import Path

from samkv_integrations.errors import InvalidOption


def read_text(path: Path) -> str:
    """The text of a file. Raises InvalidOption if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InvalidOption(f"{path} does not exist; give an existing file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{path} cannot be read as UTF-8 text ({error})") from error
