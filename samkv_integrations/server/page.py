"""``/``: a page to ask from, which needs nothing that this server does not send."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

FILE = Path(__file__).with_name("page.html")


def router() -> APIRouter:
    """The route of the page."""
    routes = APIRouter(tags=["server"])
    html = FILE.read_text(encoding="utf-8")
    headers = headers_of(html)

    @routes.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """A page to ask from."""
        return HTMLResponse(html, headers=headers)

    return routes


def headers_of(html: str) -> dict[str, str]:
    """What a browser is told of the page: to run its own script alone, and to ask nobody else."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _hash_of(tag: str, html: str) -> str:
    """The source of a policy that lets the only element of a kind stand, as it is."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
