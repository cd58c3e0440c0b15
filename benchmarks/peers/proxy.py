"""A proxy on loopback between loaders and the S3 server: it adds latency to each request, limits bytes, and counts.

Clients that read ranges send a request without a body in one piece, so each piece from a client is one request.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

__all__ = ["CountingProxy"]

_PIECE = 1 << 18


class CountingProxy:
    """Listens on a free port of 127.0.0.1 and forwards to another one. Use it as a context manager."""

    def __init__(self, target: tuple[str, int], latency_s: float, bytes_per_s: float = float("inf")) -> None:
        self._target = target
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.requests = 0
        self.num_bytes = 0
        """Bytes that the server sent."""

    @property
    def endpoint(self) -> str:
        """Return the URL that clients are given."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def reset(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.requests = self.num_bytes = 0

    def __enter__(self) -> CountingProxy:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answers, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while piece := client.recv(_PIECE):
                with self._lock:
                    self.requests += 1
                time.sleep(self._latency_s)
                server.sendall(piece)
        _shut(server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        buffer = bytearray(_PIECE)
        view = memoryview(buffer)
        with suppress(OSError):
            while size := server.recv_into(buffer):
                with self._lock:
                    self.num_bytes += size
                    self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
                    wait_s = self._free_at - time.monotonic()
                if wait_s > 0:
                    time.sleep(wait_s)
                client.sendall(view[:size])
        _shut(client)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
