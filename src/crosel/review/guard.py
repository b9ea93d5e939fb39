"""Access control: requests must come from this machine, carry the token, and be small and well-formed.

A web page elsewhere can make a browser send requests here, and by DNS rebinding even under a name of its own. So the
Host must be this machine's, an Origin must be the page's own, and nothing is answered without the token.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 4096
MAX_QUERY = 2048
HOSTS = ("127.0.0.1", "localhost")
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin", "cross-origin-opener-policy": "same-origin",
}  # fmt: skip


class Refused(Exception):  # noqa: N818  (an answer, not an error)
    def __init__(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.answer = PlainTextResponse(f"{why}\n", status, headers)


class Guard:
    """An ASGI layer around the application."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: closed before it is open
            await send({"type": "websocket.close", "code": 1008})
            return
        new_cookie = ""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
                if new_cookie:
                    headers.append("set-cookie", new_cookie)
                message = {**message, "headers": headers.raw}
            await send(message)

        request = Request(scope, receive)
        try:
            host = _check_host(request)
            _check_path(request)
            by_address = self._check_token(request, host)
            _check_origin(request, host, by_address)
            if by_address:
                new_cookie = f"{cookie_name(host)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            body = await _read_body(request)
        except Refused as refused:
            await refused.answer(scope, receive, send_guarded)
            return
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send_guarded)

    def _check_token(self, request: Request, host: str) -> bool:
        """Return whether the token was in the page's address (True), or in the cookie or the header (False)."""
        is_page = request.method == "GET" and request.scope["path"] == "/"
        if is_page and any(map(self._is_token, request.query_params.getlist("token"))):
            return True
        given = request.headers.get("x-crosel-token", ""), request.cookies.get(cookie_name(host), "")
        if any(map(self._is_token, given)):
            return False
        raise Refused(403, "Open the whole address that crosel review printed: it ends with a token.")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self._token.encode())


def cookie_name(host: str) -> str:
    """Cookies ignore ports: without the port in its name, two reviews at once would share a cookie."""
    return f"crosel_review_{host.rpartition(':')[2] if ':' in host else '80'}"


def _check_host(request: Request) -> str:
    for key in ("host", "origin", "content-length"):
        if len(request.headers.getlist(key)) > 1:
            raise Refused(400, f"Two headers {key}.")
    host = request.headers.get("host", "")
    name, colon, port = host.partition(":")
    if name not in HOSTS or (colon and not (port.isascii() and port.isdigit())):
        raise Refused(403, "This page answers only under 127.0.0.1.")
    return host


def _check_origin(request: Request, host: str, by_address: bool) -> None:
    elsewhere = request.headers.get("origin", f"http://{host}") != f"http://{host}"
    # A page on another port of this machine counts as the same site, so the cookie alone does not keep it out. Who
    # has the address with the token may follow it from anywhere.
    site = request.headers.get("sec-fetch-site", "same-origin")
    if elsewhere or (not by_address and site not in ("same-origin", "none")):
        raise Refused(403, "Requests from other pages are refused.")


def _check_path(request: Request) -> None:
    scope = request.scope
    if request.method not in ("GET", "POST"):
        raise Refused(405, "Only GET and POST.", {"allow": "GET, POST"})
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    if len(scope["query_string"]) > MAX_QUERY or len(raw) > 256:
        raise Refused(414, "The address is too long.")
    # No address of the page needs any of these, so no path has to be decoded.
    if any(part in raw for part in (b"..", b"//", b"\\", b"%", b"\0")) or "\\" in scope["path"]:
        raise Refused(400, "No such path.")


async def _read_body(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise Refused(400, "Bad content-length.")
    too_large = Refused(413, f"At most {MAX_BODY} bytes.", {"connection": "close"})  # the rest is not waited for
    if len(length) > 9 or int(length) > MAX_BODY:
        raise too_large
    body = b""
    try:
        async for part in request.stream():  # a chunked body has no length
            body += part
            if len(body) > MAX_BODY:
                raise too_large
    except ClientDisconnect:
        raise Refused(400, "Cut short.") from None
    return body
