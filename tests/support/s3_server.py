"""An S3 server on loopback (moto's), with one bucket called ``caches``.

Moto keeps objects in memory. As a process of its own this one keeps them in a folder too, so that
it may be killed and comes back with all that it has said yes to. Beside them it keeps a line for
each request in ``requests.log``: method, status and path.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch
from urllib.parse import quote, unquote

import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import S3Backend, s3_backends
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "caches"
HOST = "127.0.0.1"
LOG = "requests.log"
CREDENTIALS = {"key": "key-of-tests", "secret": "secret-of-tests"}
# what the machine's own user has configured must not be used, nor be needed
REGION = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "1"}

_ACCOUNT = "123456789012"
_CHANGES = ("PUT", "POST", "DELETE")
_TEMPORARY = ".tmp"

StartResponse = Callable[..., Any]


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Fsspec's options for one in this process, while it runs."""
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {**CREDENTIALS, "endpoint_url": f"http://{host}:{port}"}
        with patch.dict(os.environ, REGION):
            s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir(BUCKET)
            yield options
    finally:
        server.stop()


def environment_of(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": CREDENTIALS["key"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["secret"],
        **REGION,
    }


@dataclass(frozen=True)
class KeptObjects:
    """A WSGI application around moto's that keeps the bucket's objects in a folder.

    app: moto's. folder: holds a file for each object, and the log.
    """

    app: Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
    folder: Path
    _lock: Lock = field(default_factory=Lock)

    def restore(self) -> int:
        """Make the bucket, and put what the folder holds into it; how many objects."""
        backend, names = _backend(), os.listdir(self._objects)
        backend.create_bucket(BUCKET, REGION["AWS_DEFAULT_REGION"])
        kept = [name for name in names if not name.endswith(_TEMPORARY)]
        for name in kept:
            backend.put_object(BUCKET, unquote(name), (self._objects / name).read_bytes())
        return len(kept)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        told: list[str] = []

        def start(status: str, *rest: Any) -> Any:
            told.append(status.split()[0])
            return start_response(status, *rest)

        body = self.app(environ, start)
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method in _CHANGES and told[0].startswith("2"):  # before the client is told
            self._keep(path.removeprefix(f"/{BUCKET}/"))
        with self._lock, (self.folder / LOG).open("a") as log:
            log.write(f"{method} {told[0]} {path}\n")
        return body

    def _keep(self, name: str) -> None:
        """Make the file of an object what the object is."""
        file = self._objects / quote(name, safe="")
        with self._lock:
            found = _backend().head_object(BUCKET, name)
            if found is None:
                file.unlink(missing_ok=True)
                return
            written = file.with_name(file.name + _TEMPORARY)
            written.write_bytes(found.value)
            written.replace(file)

    @property
    def _objects(self) -> Path:
        folder = self.folder / "objects"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _backend() -> S3Backend:
    return s3_backends[_ACCOUNT]["aws"]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Nothing: `KeptObjects` keeps a line for each request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where objects are kept")
    given = parser.parse_args()
    kept = KeptObjects(DomainDispatcherApplication(create_backend_app), given.folder)
    kept.restore()
    make_server(HOST, given.port, kept, threaded=True, request_handler=_Quiet).serve_forever()


if __name__ == "__main__":
    main()
