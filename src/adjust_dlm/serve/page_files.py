"""The page at /: files of this package, with headers that keep everything else out of it."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
PATHS = ("/", "/page.js", "/page.css", "/icon.svg")
# Nothing but this server's own files may be loaded, nothing but this server asked, and no text become HTML.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _route(path: str) -> Route:
    async def answer(_request: Request) -> FileResponse:
        return FileResponse(FOLDER / (path[1:] or "index.html"), headers=HEADERS)

    return Route(path, answer)


# One for each file: what no route knows stays 404, and a known path with another method 405.
ROUTES = [_route(path) for path in PATHS]
