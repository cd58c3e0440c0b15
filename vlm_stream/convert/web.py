"""Web addresses that records name: which hosts may be asked, how long and how much.

A record is somebody else's text, and this machine can reach what they cannot: services on loopback, the metadata of a
cloud (link-local), machines of its network. So hosts are resolved here, their addresses are checked, and the connection
goes to the address that was checked; every redirect is a new request with the same checks.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import urlsplit

from vlm_stream.errors import BadSampleError

PUBLIC: Final = "public"
"""Among hosts: any that has public addresses alone."""
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


def open_web(hosts: tuple[str, ...], context: ssl.SSLContext, deadline_s: float) -> urllib.request.OpenerDirector:
    """Return what sends requests: http and https alone, with the system's proxies."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
        _Requests(hosts, deadline_s, context),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https"):
            fp.close()
            raise BadSampleError(
                "convert", "bad_url", f"{req.full_url} leads to {newurl}; only http and https are followed."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Requests(urllib.request.HTTPSHandler):
    """Both schemes."""

    http_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, hosts: tuple[str, ...], deadline_s: float, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._limits = hosts, deadline_s
        self._secure = functools.partial(http.client.HTTPSConnection, context=context)

    def http_open(self, req: Any) -> Any:
        return _send(self.do_open, http.client.HTTPConnection, req, *self._limits)

    def https_open(self, req: Any) -> Any:
        return _send(self.do_open, self._secure, req, *self._limits)


def _send(
    do_open: Callable[..., Any], make: Callable[..., Any], request: Any, hosts: tuple[str, ...], deadline_s: float
) -> Any:
    """Send a request and return the answer, whose headers must be there before the deadline."""
    opened: list[Any] = []
    proxied = getattr(request, "_tunnel_host", None) is not None or request.has_proxy()
    if proxied:  # the proxy resolves names; what this machine knows of them is checked all the same
        with contextlib.suppress(socket.gaierror):
            _resolve(urlsplit(request.full_url).hostname or "", None, hosts)

    def connect(host: str, **options: Any) -> Any:
        connection = make(host, **options)
        if not proxied:
            connection._create_connection = functools.partial(_connect, hosts)
        opened.append(connection)
        return connection

    late = threading.Event()

    def cut() -> None:
        late.set()
        for connection in opened:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(deadline_s, cut)
    timer.daemon = True
    timer.start()
    try:
        answer = do_open(connect, request)
    finally:
        timer.cancel()
    if late.is_set():  # headers that are cut look like whole ones
        answer.close()
        raise TimeoutError("its headers were not whole at the deadline")
    return answer


def _connect(
    hosts: tuple[str, ...], address: tuple[str, int], timeout: Any = None, _source: Any = None
) -> socket.socket:
    """Connect to one of the addresses that were checked: a name that is resolved again may lead elsewhere."""
    fault: OSError | None = None
    for family, kind, protocol, _, place in _resolve(address[0], address[1], hosts):
        own = socket.socket(family, kind, protocol)
        try:
            own.settimeout(timeout)
            own.connect(place)
        except OSError as error:
            own.close()
            fault = error
        else:
            return own
    raise fault or OSError(f"{address[0]} has no address")


def _resolve(host: str, port: int | None, hosts: tuple[str, ...]) -> list[Any]:
    """Return the addresses of a host.

    Raises:
        BadSampleError: It may not be asked.
    """
    name = host.lower().strip("[]").rstrip(".")
    if "@" in name:
        raise BadSampleError("convert", "bad_url", "The address holds a user or password, which are not sent.")
    if any(fnmatchcase(name, pattern.lower()) for pattern in hosts if pattern != PUBLIC):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if PUBLIC not in hosts:
        raise _refuse(host, "is none of the media_hosts")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, place in found:
        if not _is_public(str(place[0])):
            raise _refuse(host, f"is not public ({place[0]})")
    return found


def _refuse(host: str, what: str) -> BadSampleError:
    return BadSampleError(
        "convert",
        "refused_host",
        f"The host {host} {what}, and records may not reach into private networks, so it was not asked. If you trust "
        f"the data: --media-hosts public,{host} (media_hosts in Python).",
    )


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(str(inner))
    return ip.is_global and not ip.is_multicast
