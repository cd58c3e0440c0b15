"""Serves pages and media of a `Viewer` by HTTP, on this machine alone unless told otherwise.

Enters: requests. Leaves: pages that may load and run nothing but our own style sheet and script, and media with their
own types. Bound to another address than loopback, every request must bring the token of the URL that was printed, or
the cookie that it sets.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import re
import secrets
import socket
import threading
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError, ConfigError, InputError, MissingExtraError, VlmStreamError
from vlm_stream.format import medium_of
from vlm_stream.view import routes
from vlm_stream.view.frame import error_page, static_text, waiting_page
from vlm_stream.view.html import url
from vlm_stream.view.pictures import type_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.view.viewer import Viewer

POLICY: Final = (
    "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_MEDIA_POLICY: Final = "default-src 'none'; sandbox; frame-ancestors 'none'"
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_STATIC: Final = {"view.css": "text/css", "view.js": "text/javascript"}
_logger = logging.getLogger("vlm_stream")
_COOKIE: Final = "vlm_stream_view"
_MAX_PIECE: Final = 8 << 20
"""Bytes of a member that are read at a time; an answer to a range holds no more."""


def make_app(viewer: Viewer, *, token: str | None = None, hosts: frozenset[str] | None = None) -> Any:
    """Return the ASGI application.

    Args:
        viewer: What is shown.
        token: What requests must bring; None: nothing.
        hosts: Names under which the server may be asked, so that no other site's name can be made to lead here; None:
            any.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, RedirectResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError("starlette", "view", "The viewer") from error

    def page(make: Callable[..., Any], request: Any) -> Any:
        here = request.url.path.strip("/").partition("/")[0]
        try:
            with viewer.pace.page():
                found = make(viewer, request.query_params)
        except Exception as error:  # whatever it is, the next page may do without it
            text, status = _say(error, request.url.path)
            return HTMLResponse(str(error_page(text, here)), status)
        if isinstance(found, routes.Moved):
            return RedirectResponse(found.to, 303)
        if isinstance(found, routes.Waiting):
            return HTMLResponse(str(waiting_page(found.title, here)), headers={"refresh": "0"})
        return HTMLResponse(str(found))

    def picture(make: Callable[..., bytes], request: Any) -> Any:
        keeps = "no-store"  # what cannot be drawn now may be drawn later
        try:
            with viewer.pace.page():
                data, keeps = make(viewer, request.query_params), "private, max-age=600"
        except VlmStreamError as error:
            data = routes.no_picture(str(error))
        except Exception as error:
            _logger.exception("the viewer could not draw %s", request.url.path)
            data = routes.no_picture(f"{type(error).__name__}: {error}")
        return Response(data, media_type="image/jpeg", headers={"cache-control": keeps})

    def static(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in _STATIC:
            return Response("there is no such file", 404, media_type="text/plain")
        return Response(static_text(name), media_type=_STATIC[name], headers={"cache-control": "private, max-age=600"})

    def member(request: Any) -> Any:
        return _member(viewer, request, Response)

    listed = [Route(path, partial(page, make)) for path, make in routes.PAGES.items()]
    listed += [Route(path, partial(picture, make)) for path, make in routes.PICTURES.items()]

    def icon(_request: Any) -> Any:
        return Response(routes.icon(), media_type="image/png", headers={"cache-control": "private, max-age=86400"})

    listed += [Route("/static/{name}", static), Route("/member", member), Route("/favicon.ico", icon)]
    return _Guard(Starlette(routes=listed), token=token, hosts=hosts)


def _say(error: Exception, path: str) -> tuple[str, int]:
    """Return what is said of an error in place of a page, and the status of the answer."""
    if isinstance(error, BadSampleError):
        return f"{error.stage}: {error.reason}: {error}", 404
    if isinstance(error, VlmStreamError):
        return str(error), 400 if isinstance(error, InputError) else 500
    _logger.error("the viewer could not make %s", path, exc_info=error)
    return f"{type(error).__name__}: {error}", 500


def _member(viewer: Viewer, request: Any, respond: Any) -> Any:
    """Answer with the bytes of a member, or with the range of them that was asked for; nothing else is read."""
    try:
        ref, name = routes.ref_of(viewer, request.query_params), request.query_params.get("member", "")
        (drawn,) = viewer.catalog.draw([ref])
        size = next((size for own, _, size in drawn.members if own == name), 0)
        asked = _range(request.headers.get("range", ""), size)
        begin, end = asked or (0, size)
        if asked and begin >= size:
            return respond("there are no such bytes", 416, headers={"content-range": f"bytes */{size}"})
        data = viewer.catalog.read_member(drawn, name, begin, min(end, begin + _MAX_PIECE))
    except (InputError, BadSampleError) as error:
        return respond(str(error), 404, media_type="text/plain")
    kind = type_of(name) if medium_of(name) else None
    headers = {
        "accept-ranges": "bytes",
        "content-security-policy": _MEDIA_POLICY,
        "cache-control": "private, max-age=600",
    }
    if kind is None:
        headers["content-disposition"] = "attachment"
    if asked:
        headers["content-range"] = f"bytes {begin}-{begin + len(data) - 1}/{size}"
    kind = kind or "application/octet-stream"
    if end - begin > len(data):
        from starlette.responses import StreamingResponse

        pieces = (
            viewer.catalog.read_member(drawn, name, at, at + _MAX_PIECE) for at in range(len(data), size, _MAX_PIECE)
        )
        headers["content-length"] = str(size)
        return StreamingResponse(itertools.chain([data], pieces), headers=headers, media_type=kind)
    return respond(data, 206 if asked else 200, headers=headers, media_type=kind)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """Return the bytes that a Range header asks for; None: all of them, and a range past the end begins there.

    >>> _range("bytes=5-9", 100), _range("bytes=-10", 100), _range("bytes=90-", 100), _range("bytes=200-", 100)
    ((5, 10), (90, 100), (90, 100), (100, 100))
    >>> _range("", 100), _range("bytes=9-5", 100), _range("bytes=-0", 100), _range("bytes=1-2,5-6", 100)
    (None, None, (100, 100), None)
    """
    found = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", asked)
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    begin = min(int(first), size)
    return begin, min(int(last) + 1 if last else size, size, begin + _MAX_PIECE)


class _Guard:
    """Lets nobody in without the token, and sends strict headers with every answer."""

    def __init__(self, app: Any, *, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app, self._token, self._hosts = app, token, hosts
        # Browsers keep one jar for all ports of a host.
        self._cookie = f"{_COOKIE}_{hashlib.sha256((token or '').encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        async def send_strictly(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.decode().lower() for name, _ in message["headers"]}
                more = _HEADERS | {"content-security-policy": POLICY}
                message["headers"] += [(k.encode(), v.encode()) for k, v in more.items() if k not in given]
            await send(message)

        request = Request(scope)
        answer: Any = None
        if request.method not in ("GET", "HEAD"):
            answer = PlainTextResponse("this server only shows", 405)
        elif self._hosts is not None and (request.url.hostname or "") not in self._hosts:
            answer = PlainTextResponse("this server is asked under a name that is not its own", 421)
        elif self._token is not None:
            given = request.query_params.get("token", "")
            if secrets.compare_digest(given.encode(), self._token.encode()):
                left = {key: value for key, value in request.query_params.items() if key != "token"}
                answer = RedirectResponse(url(request.url.path, **left), 303)
                answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            elif not secrets.compare_digest(request.cookies.get(self._cookie, "").encode(), self._token.encode()):
                answer = PlainTextResponse("open the URL with the token that was printed at the start", 403)
        await (answer or self._app)(scope, receive, send_strictly)


class ViewServer:
    """A running or startable server of a viewer."""

    def __init__(self, viewer: Viewer, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind to an address; the port 0 takes any that is free.

        Raises:
            ConfigError: The address is taken or is none of this machine's.
            MissingExtraError: The extra `view` is not installed.
        """
        try:
            import uvicorn
        except ImportError as error:
            raise MissingExtraError("uvicorn", "view", "The viewer") from error
        self.viewer = viewer
        is_local = _is_loopback(host)
        self.token = None if is_local else secrets.token_urlsafe(18)
        hosts = frozenset(("127.0.0.1", "localhost", "::1", host)) if is_local else None
        app = make_app(viewer, token=self.token, hosts=hosts)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            way = "choose another --port, or 0 for any that is free"
            if getattr(error, "errno", None) not in (errno.EADDRINUSE, errno.EACCES) and 0 <= port < 1 << 16:
                way = "choose another --host: 127.0.0.1, an address of this machine, or 0.0.0.0 for all of them"
            raise ConfigError(
                f"the viewer cannot listen at {host}:{port} ({getattr(error, 'strerror', None) or error}); {way}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")
        """Where to point a browser."""
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.viewer.warm(*routes.first_pages(self.viewer))
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.viewer.close()

    def start(self) -> ViewServer:
        """Serve from a thread of this process; the server ends with `close` or with the process."""
        self.viewer.warm(*routes.first_pages(self.viewer))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="vlm-stream-view", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(10)
        self._socket.close()
        self.viewer.close()

    def __enter__(self) -> ViewServer:
        """Return the server itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return where it is."""
        return f"ViewServer at {self.url}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
