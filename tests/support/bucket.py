"""The S3 server of the tests as a process of its own, which a test may kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import httpx

from tests.support.chroma_server import free_port
from tests.support.processes import wait_until
from tests.support.s3_server import HOST, LOG, environment_of


class Bucket:
    """It comes back at the same port, with all that it held. folder: where it is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self._port)

    def start(self) -> None:
        """Returns when it answers."""
        module = ("-m", "tests.support.s3_server")
        where = ("--port", str(self._port), "--folder", str(self._folder))
        self._process = subprocess.Popen([sys.executable, *module, *where])
        wait_until(self._answers, "the S3 server answers")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def n_chunks(self) -> int:
        return len([*self._files()])

    def chunks(self) -> dict[str, bytes]:
        """Chunk files that it holds, by the key of the chunk."""
        names = [(file, unquote(file.name).rpartition("/")[2]) for file in self._files()]
        return {name.removesuffix(".safetensors"): file.read_bytes() for file, name in names}

    def _files(self) -> Iterator[Path]:
        return (self._folder / "objects").glob("*.safetensors")

    def n_fetched(self) -> int:
        """Chunk files that were read as a whole, since the first start."""
        lines = (self._folder / LOG).read_text().splitlines()
        return sum(line.startswith("GET 200 ") and line.endswith(".safetensors") for line in lines)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "it ended"
        try:
            with httpx.Client(trust_env=False) as client:
                client.get(f"http://{HOST}:{self._port}/")
        except httpx.TransportError:
            return False
        return True
