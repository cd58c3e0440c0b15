"""A loopback HTTP proxy that spoils what passes through it, so that clients meet the faults of real networks.

`proxy.faults` is a list of faults for the next requests, or a function from (request number, method, path) to one.
Requests are passed on as they are signed: the server behind it must accept the proxy's address as its own name.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO, Final, Literal
from urllib.parse import urlsplit

_BUFFER: Final = 256 * 1024
_OTHERS: Final = bytes(byte ^ 0x55 for byte in range(256))
_CODES: Final = {403: "ExpiredToken", 503: "SlowDown"}


@dataclass(frozen=True)
class Fault:
    """What to do to one request."""

    kind: Literal["status", "cut", "flip", "slow", "stall", "reset", "length", "stale"]
    """A body of a wrong length promises more than it has; a stale one is that of another object, with its etag."""
    status: int = 503
    at: int = 1000
    """Byte of the body at which it is cut, flipped or stalled."""
    seconds: float = 0.05
    """Pause between pieces of a slow body, or the length of a stall."""


class FaultProxy:
    """Stands before one server. Use it as a context manager."""

    def __init__(self, upstream: int | str) -> None:
        """Name the server: a port of this machine, or a URL."""
        parts = urlsplit(upstream if isinstance(upstream, str) else f"http://127.0.0.1:{upstream}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._server = parts.hostname or "", parts.port or (80 if self._tls is None else 443)
        self.faults: list[Fault | None] | Callable[[int, str, str], Fault | None] = []
        self.seen: Counter[str] = Counter()
        self.ranges: list[str] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closing = threading.Event()

    def __enter__(self) -> FaultProxy:
        """Listen."""
        self._listen(0)
        self.port = self._listener.getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        """Drop all connections."""
        self._closing.set()
        self._stop_listening()
        self._drop_all()

    @property
    def endpoint(self) -> str:
        """Return the URL that clients are given."""
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse connections, and drop those that are open."""
        self._stop_listening()
        self._drop_all()
        try:
            yield
        finally:
            self._listen(self.port)

    def _drop_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        plain = socket.create_connection(self._server)
        return plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname=self._server[0])

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._accepting.start()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = client.makefile("rb")
            upstream = self._connect()
            answers: Any = upstream.makefile("rb", buffering=_BUFFER)
            while head := _read_head(reader):
                if not self._exchange(head, reader, client, upstream, answers):
                    return
        except (OSError, ValueError):
            pass
        finally:
            for each in (client, upstream):
                if each is not None:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                    each.close()
            with self._lock:
                self._sockets.discard(client)

    def _next_fault(self, head: bytes) -> Fault | None:
        with self._lock:
            number = next(self._numbers)
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            self.seen[method] += 1
            self.ranges.append(_header(head, b"range").decode())
            if callable(self.faults):
                return self.faults(number, method, path)
            return self.faults.pop(0) if self.faults else None

    def _exchange(
        self, head: bytes, reader: BinaryIO, client: socket.socket, upstream: socket.socket, answers: Any
    ) -> bool:
        """Pass one request on and its answer back, spoiled; return whether the connection goes on."""
        body = reader.read(int(_header(head, b"content-length") or 0))
        fault = self._next_fault(head)
        if fault is not None and fault.kind == "status":
            text = f"<Error><Code>{_CODES.get(fault.status, 'X')}</Code></Error>".encode()
            reason = HTTPStatus(fault.status).phrase
            client.sendall(f"HTTP/1.1 {fault.status} {reason}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return True
        if fault is not None and fault.kind == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return False
        upstream.sendall(head + body)
        answer = _read_head(answers)
        size = 0 if head.startswith(b"HEAD") else int(_header(answer, b"content-length") or 0)
        if fault is not None and fault.kind == "length":
            answer = _with_header(answer, b"content-length", str(size + fault.at).encode())
        elif fault is not None and fault.kind == "stale":
            answer = _with_header(answer, b"etag", b'"0123456789abcdef0123456789abcdef"')
        client.sendall(answer)
        return self._relay(answers, client, size, fault) and (fault is None or fault.kind != "length")

    def _relay(self, answers: Any, client: socket.socket, size: int, fault: Fault | None) -> bool:
        num_sent = 0
        while num_sent < size:
            piece = answers.read1(min(_BUFFER, size - num_sent))
            if not piece:
                return False
            if fault is not None and fault.kind == "stale":
                piece = piece.translate(_OTHERS)
            if fault is not None and num_sent <= fault.at < num_sent + len(piece):
                at = fault.at - num_sent
                if fault.kind == "flip":
                    piece = piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]
                elif fault.kind == "cut":
                    client.sendall(piece[:at])
                    return False
                elif fault.kind == "stall":
                    client.sendall(piece[:at])
                    self._closing.wait(fault.seconds)
                    piece = piece[at:]
                    num_sent += at
            if fault is not None and fault.kind == "slow":
                for begin in range(0, len(piece), 1000):
                    client.sendall(piece[begin : begin + 1000])
                    time.sleep(fault.seconds)
            else:
                client.sendall(piece)
            num_sent += len(piece)
        return True


def _read_head(stream: BinaryIO) -> bytes:
    lines = []
    while line := stream.readline(65536):
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _with_header(head: bytes, name: bytes, value: bytes) -> bytes:
    lines = [line for line in head.split(b"\r\n") if line.partition(b":")[0].strip().lower() != name]
    return b"\r\n".join([lines[0], name + b": " + value, *lines[1:]])
