"""A loopback HTTP proxy that spoils what passes through it, so that clients meet the faults of real networks.

`proxy.faults` is a list of faults for the next requests, or a function from (request number, method, path) to one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUFFER = 256 * 1024
_REASONS = {
    403: "Forbidden",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Error",
    503: "Slow Down",
}


@dataclass(frozen=True)
class Fault:
    """What to do to one request."""

    kind: Literal["status", "cut", "flip", "slow", "stall", "reset"]
    status: int = 503
    at: int = 1000
    """Byte of the body at which it is cut, flipped or stalled."""
    seconds: float = 0.05
    """Pause between pieces of a slow body, or the length of a stall."""


@dataclass
class FaultMix:
    """Random faults at fixed rates, the same for the same seed."""

    failing: float = 0.0
    throttled: float = 0.0
    cut: float = 0.0
    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def __call__(self, number: int, method: str, path: str) -> Fault | None:
        draw = self._rng.random()
        for kind, rate in (("failing", self.failing), ("throttled", self.throttled), ("cut", self.cut)):
            if draw < rate:
                if kind == "cut":
                    return Fault("cut", at=self._rng.randrange(100_000))
                return Fault("status", status=500 if kind == "failing" else 503)
            draw -= rate
        return None


class FaultProxy:
    """Stands before one upstream port. Use it as a context manager."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: list[Fault | None] | Callable[[int, str, str], Fault | None] = []
        self.seen: Counter[str] = Counter()
        self.ranges: list[str] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closing = threading.Event()

    def __enter__(self) -> FaultProxy:
        self._listen(0)
        self.port = self._listener.getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._stop_listening()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        with self._lock:
            return len(self._sockets)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse connections, and drop those that are open."""
        self._stop_listening()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self._listen(self.port)

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
            upstream = socket.create_connection(("127.0.0.1", self.upstream))
            answers = upstream.makefile("rb", buffering=_BUFFER)
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

    def _exchange(self, head: bytes, reader, client: socket.socket, upstream: socket.socket, answers) -> bool:
        """Pass one request on and its answer back, spoiled; return whether the connection goes on."""
        body = reader.read(int(_header(head, b"content-length") or 0))
        fault = self._next_fault(head)
        if fault is not None and fault.kind == "status":
            text = b"<Error><Code>SlowDown</Code></Error>" if fault.status == 503 else b"<Error><Code>X</Code></Error>"
            reason = _REASONS.get(fault.status, "Status")
            client.sendall(f"HTTP/1.1 {fault.status} {reason}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return True
        if fault is not None and fault.kind == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return False
        upstream.sendall(head + body)
        answer = _read_head(answers)
        size = 0 if head.startswith(b"HEAD") else int(_header(answer, b"content-length") or 0)
        client.sendall(answer)
        return self._relay(answers, client, size, fault)

    def _relay(self, answers, client: socket.socket, size: int, fault: Fault | None) -> bool:
        num_sent = 0
        while num_sent < size:
            piece = answers.read1(min(_BUFFER, size - num_sent))
            if not piece:
                return False
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


def _read_head(stream) -> bytes:
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
