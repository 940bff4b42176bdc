"""The page at /: files of this package, with headers that keep everything else out of it."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers ask each time, and get 304 while nothing has changed
}


class PageFiles(StaticFiles):
    """Nothing but this server's own files may be loaded, and nothing but this server may be asked."""

    def __init__(self) -> None:
        """See the class."""
        super().__init__(directory=FOLDER, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with the headers."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
