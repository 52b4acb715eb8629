"""The page: what its file holds and what browsers are told of it, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

from samkv_integrations.server.app import PAGE
from tests.support.served_town import KEYS, Town

HTML = PAGE.read_text(encoding="utf-8")


async def test_it_is_served_to_everybody_with_a_strict_policy(tmp_path: Path) -> None:
    response = await Town(tmp_path, keys=KEYS).send("GET", "/")
    assert (response.status_code, response.text) == (200, HTML)
    headers = response.headers
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[kind])


def test_nothing_in_it_is_of_elsewhere_or_would_be_refused() -> None:
    addresses = {address for address in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", HTML)}
    assert addresses == {"http://www.w3.org"}  # the name of SVG, which nobody asks for
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", HTML)
    script = re.search("<script>(.*)</script>", HTML, re.DOTALL)
    assert script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval", script[1])
    assert len(HTML.splitlines()) <= 400
