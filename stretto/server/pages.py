"""The page at /: it serves files of the `web` folder, and nothing else.

The folder is listed once, when the app is made, and a request is looked up in that list: no path
that a client sends leads out of it. All scripts and styles are files of the folder, none is inline,
and the headers make the browser refuse anything else."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

WEB = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
    ".wav": "audio/wav",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; base-uri 'none'; "
        "object-src 'none'; "
        "frame-ancestors 'none'; form-action 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "microphone=(self), camera=(self), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
MISSING = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Not found</title>"
    "<h1>There is nothing here</h1><p>The API is at <code>/v1</code>, its description at "
    "<a href=/docs>/docs</a>.</p></html>"
)


class Pages:
    def __init__(self, folder: Path = WEB) -> None:
        found = folder.rglob("*") if folder.is_dir() else ()
        self.files = {
            "/" + p.relative_to(folder).as_posix(): p
            for p in found
            if p.is_file()
            and not p.is_symlink()
            and p.suffix in TYPES
            and not p.name.startswith(".")
        }
        if "/index.html" in self.files:
            self.files["/"] = self.files["/index.html"]

    def get(self, path: str) -> Response | None:
        file = self.files.get(path)
        if file is None:
            return None
        return Response(file.read_bytes(), 200, HEADERS, TYPES[file.suffix])

    def missing(self, request: Request) -> Response | None:
        """The 404 page, for clients that accept HTML."""
        if "text/html" in request.headers.get("accept", ""):
            return Response(MISSING, 404, HEADERS, TYPES[".html"])
        return None
