"""The chat page: one file that holds no secret, no name of a model and no version, shown in place of a refusal."""

import base64
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from importlib.resources import files

from phalanx.serve.access.refusals import App, Receive, Scope, Send

_HASHED = re.compile(rb"<(style|script)\b[^>]*>(.*?)</\1>", re.DOTALL)
_FIXED_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "no-referrer",
    "vary": "accept, sec-fetch-dest",
    "www-authenticate": "Bearer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class ChatPage:
    """ASGI middleware before the door: a browser that opens ``/`` without a key is shown the page with its 401.

    Args:
        app: The guarded application; every other request goes there unchanged.
        names: Names under which browsers may open the page, beside localhost and plain addresses. Under TLS every
            name may: the certificate has bound it.
        page: Another page than the chat page, under the same rules.

    Guarantees:
        The answer has status 401 like every other one without a key, and is the same bytes for everybody. A page of
        somebody else can neither frame it, nor show it under a name of their own that they let point here (DNS
        rebinding), nor have it send a request: the page adds its secret itself, a browser never does. Within the page
        no script runs but its own, none can be made from a text, and nothing is asked from another server.
    """

    def __init__(self, app: App, names: Iterable[str] = (), page: bytes | None = None) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names) | {"localhost"}
        self._body = files("phalanx.serve").joinpath("chat_page.html").read_bytes() if page is None else page
        headers = {**_FIXED_HEADERS, "content-security-policy": make_policy(self._body)}
        headers["content-length"] = str(len(self._body))
        self._headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection as ASGI wants it."""
        if not self._shows_page(scope):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})

    def _shows_page(self, scope: Scope) -> bool:
        if (scope["type"], scope.get("method"), scope.get("path")) != ("http", "GET", "/"):
            return False
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope.get("query_string") or b"authorization" in headers or b"x-api-key" in headers:
            return False
        if headers.get(b"sec-fetch-dest", "document") != "document" or "text/html" not in headers.get(b"accept", ""):
            return False
        return scope.get("scheme") == "https" or self._is_own_name(headers.get(b"host", ""))

    def _is_own_name(self, host: str) -> bool:
        name = re.sub(r":\d{1,5}\Z", "", host)
        try:
            # nobody else can let a plain address point elsewhere
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return name.lower() in self._names
        return True


def make_policy(page: bytes) -> str:
    """Return the content security policy of a page: its own style and script by their digests, and nothing else."""
    digests: dict[bytes, list[str]] = {b"style": [], b"script": []}
    for match in _HASHED.finditer(page):
        digests[match[1]].append(f"'sha256-{base64.b64encode(hashlib.sha256(match[2]).digest()).decode('ascii')}'")
    directives = {
        "default-src": "'none'",
        "script-src": " ".join(digests[b"script"]),
        "style-src": " ".join(digests[b"style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())
