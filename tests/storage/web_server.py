"""A threaded web server with byte ranges, and one that speaks enough of the Hugging Face Hub's API to be read."""

from __future__ import annotations

import http.server
import json
import re
import ssl
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit


class WebServer:
    """Serves `files`, a dict from path to bytes. Use it as a context manager."""

    def __init__(
        self, files: dict[str, bytes], *, ranges: bool = True, certificate: Path | None = None, missing: int = 404
    ) -> None:
        """Answer with `missing` what is not there."""
        handler = type("Handler", (_Handler,), {"files": files, "ranges": ranges, "missing": missing})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.scheme = "https"
        self.port = self._server.server_address[1]
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> WebServer:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    ranges: bool
    missing: int

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path).strip("/") + "?recursive" * ("recursive=true" in parts.query.lower())
        blob = self.files.get(path)
        if blob is None:
            self._send(self.missing, b"", {})
            return
        headers = {"ETag": f'"{len(blob)}-{hash(blob)}"', "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not (match and self.ranges):
            self._send(200, blob, headers, with_body=with_body)
            return
        begin = int(match[1])
        end = min(int(match[2]) + 1 if match[2] else len(blob), len(blob))
        if begin >= len(blob):
            self._send(416, b"", {"Content-Range": f"bytes */{len(blob)}"})
            return
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(blob)}"
        self._send(206, blob[begin:end], headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class HubServer(WebServer):
    """One dataset repository, `owner/name`, as the Hub would serve it to be read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        served = {f"datasets/owner/name/resolve/main/{path}": blob for path, blob in files.items()}
        api = "api/datasets/owner/name"
        served[f"{api}/revision/main"] = served[api] = json.dumps(
            {"id": "owner/name", "sha": "0" * 40, "siblings": [], "private": False, "tags": [], "downloads": 0}
        ).encode()
        entries = [
            {"type": "file", "path": path, "size": len(blob), "oid": f"{position:040x}"}
            for position, (path, blob) in enumerate(sorted(files.items()))
        ]
        folders = {""} | {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
        for folder in folders:
            inside = [entry for entry in entries if entry["path"].startswith(f"{folder}/" if folder else "")]
            direct = [entry for entry in inside if "/" not in entry["path"].removeprefix(folder).strip("/")]
            below = {f for f in folders if f and str(Path(f).parent) == (folder or ".")}
            direct += [{"type": "directory", "path": each, "oid": "f" * 40, "size": 0} for each in sorted(below)]
            served[f"{api}/tree/main/{folder}".strip("/")] = json.dumps(direct).encode()
            served[f"{api}/tree/main/{folder}".strip("/") + "?recursive"] = json.dumps(inside).encode()
        super().__init__(served)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a PEM file with key and certificate for 127.0.0.1, and one with the authority that signed it."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new, "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(*new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
    openssl("x509", "-req", "-in", "server.csr", *sign, "-out", "server.crt")
    server = folder / "server.pem"
    server.write_bytes((folder / "server.key").read_bytes() + (folder / "server.crt").read_bytes())
    return server, folder / "ca.pem"
