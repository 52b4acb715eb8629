"""The page: what its file holds and what browsers are told of it, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samkv_integrations.server.app import PAGE
from tests.support.served_town import KEYS, Town

HTML = PAGE.read_text(encoding="utf-8")
COLOURS = {
    name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", HTML)
}


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


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground", "least"),
    [
        ("ink", "card", 4.5), ("ink", "ground", 4.5), ("faint", "card", 4.5),
        ("faint", "ground", 4.5), ("wrong", "card", 4.5), ("accent", "card", 4.5),
        ("on-accent", "accent", 4.5), ("field", "card", 3.0), ("second", "card", 3.0),
    ],
)  # fmt: skip
def test_colours_can_be_told_apart(text: str, ground: str, least: float, scheme: int) -> None:
    """As WCAG 2.2 asks: text (1.4.3), and the edges of fields and bars (1.4.11)."""
    darker, lighter = sorted(luminance(COLOURS[name][scheme]) for name in (text, ground))
    assert (lighter + 0.05) / (darker + 0.05) >= least
