"""Access control: requests must come from this machine, carry the token, and be small and well-formed.

A web page elsewhere can make a browser send requests here, and by DNS rebinding even under a name of its own. So the
Host must be this machine's, an Origin must be the page's own, and nothing is answered without the token.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY = 4096
MAX_QUERY = 2048
HOSTS = ("127.0.0.1", "localhost")
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
     b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"), (b"cross-origin-opener-policy", b"same-origin"),
)  # fmt: skip


class Refused(Exception):  # noqa: N818  (an answer, not an error)
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """An ASGI layer around the application."""

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: closed before it is open
            await send({"type": "websocket.close", "code": 1008})
            return
        new_cookie: bytes | None = None

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *HEADERS]
                if not any(name.lower() == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                if new_cookie is not None:
                    headers.append((b"set-cookie", new_cookie))
                message = {**message, "headers": headers}
            await send(message)

        try:
            headers = _headers(scope)
            host = _check_host(headers)
            _check_path(scope)
            by_address = self._check_token(scope, headers, host)
            _check_origin(headers, host, by_address)
            if by_address:
                new_cookie = b"%s=%s; Path=/; HttpOnly; SameSite=Strict" % (cookie_name(host).encode(), self._token)
            body = await _read_body(headers, receive)
        except Refused as refused:
            await _answer(send_guarded, refused)
            return
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send_guarded)

    def _check_token(self, scope: MutableMapping[str, Any], headers: dict[str, str], host: str) -> bool:
        """Return whether the token was in the page's address (True), or in the cookie or the header (False)."""
        if scope["path"] == "/" and scope["method"] == "GET" and scope["query_string"]:
            for token in parse_qs(scope["query_string"].decode("latin-1")).get("token", ()):
                if self._is_token(token):
                    return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name(host))
        except CookieError:
            cookie = None
        if self._is_token(headers.get("x-crosel-token", "")) or (cookie is not None and self._is_token(cookie.value)):
            return False
        raise Refused(403, "Open the whole address that crosel review printed: it ends with a token.")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


def cookie_name(host: str) -> str:
    """Cookies ignore ports: without the port in its name, two reviews at once would share a cookie."""
    return f"crosel_review_{host.rpartition(':')[2] if ':' in host else '80'}"


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in out and key in ("host", "origin", "content-length"):
            raise Refused(400, f"Two headers {key}.")
        out[key] = value.decode("latin-1")
    return out


def _check_host(headers: dict[str, str]) -> str:
    host = headers.get("host", "")
    name, colon, port = host.partition(":")
    if name not in HOSTS or (colon and not (port.isascii() and port.isdigit())):
        raise Refused(403, "This page answers only under 127.0.0.1.")
    return host


def _check_origin(headers: dict[str, str], host: str, by_address: bool) -> None:
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        raise Refused(403, "Requests from other pages are refused.")
    # A page on another port of this machine counts as the same site, so the cookie alone does not keep it out. Who
    # has the address with the token may follow it from anywhere.
    if not by_address and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "Requests from other pages are refused.")


def _check_path(scope: MutableMapping[str, Any]) -> None:
    if scope["method"] not in ("GET", "POST"):
        raise Refused(405, "Only GET and POST.")
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    if len(scope["query_string"]) > MAX_QUERY or len(raw) > 256:
        raise Refused(414, "The address is too long.")
    # No address of the page needs any of these, so no path has to be decoded.
    if any(part in raw for part in (b"..", b"//", b"\\", b"%", b"\0")) or "\\" in scope["path"]:
        raise Refused(400, "No such path.")


async def _read_body(headers: dict[str, str], receive: Receive) -> bytes:
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise Refused(400, "Bad content-length.")
    too_large = Refused(413, f"At most {MAX_BODY} bytes.")
    if len(length) > 9 or int(length) > MAX_BODY:
        raise too_large
    body = b""
    while True:  # a chunked body has no length
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "Cut short.")
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY:
            raise too_large
        if not message.get("more_body"):
            return body


async def _answer(send: Send, refused: Refused) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    if refused.status == 413:  # do not wait for the rest of the body
        headers.append((b"connection", b"close"))
    if refused.status == 405:
        headers.append((b"allow", b"GET, POST"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": refused.why.encode() + b"\n"})
