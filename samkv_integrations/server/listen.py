"""The socket that a server listens on, and who may reach it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from samkv_integrations.errors import InvalidOption
from samkv_integrations.server.keys import ApiKeys


def listen_on(host: str, port: int, keys: ApiKeys) -> socket.socket:
    """A socket that takes connections; port 0 is any free one.

    Raises InvalidOption if the port is taken, or the address is not this machine's; or if others
    could reach it, and there are no keys.
    """
    if not (keys or _is_loopback(host)):
        raise InvalidOption(
            f"--host {host} without API keys: everybody who reaches this machine could ask; give "
            "--api-keys FILE or the variable SAMKV_API_KEYS, or leave --host out"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # without what was tried
        taken = error.errno == errno.EADDRINUSE
        remedy = "give another --port, or 0 for a free one" if taken else "give --host and --port"
        raise InvalidOption(f"cannot listen on {host} port {port}: {why}; {remedy}") from error
    except OverflowError as error:
        raise InvalidOption(f"--port {port}; give 0 to 65535") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
