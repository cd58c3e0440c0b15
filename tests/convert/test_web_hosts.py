"""Records do not reach into private networks, take no endless answers, and leave no secrets where people look."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import make_shards, precount
from vlm_stream.convert.media_bytes import MediaReader, MediaRules
from vlm_stream.convert.web import _is_public
from vlm_stream.errors import BadSampleError
from vlm_stream.format import load_manifest
from vlm_stream.media import MediaLimits
from vlm_stream.storage import RetryOptions, StoreOptions, open_store
from vlm_stream.testing import build_processor, make_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JPEG = make_jpeg(30, 40)
QUICK = StoreOptions(retry=RetryOptions(max_retries=0, deadline_s=5.0), read_timeout_s=5.0)
LOCAL = MediaRules(hosts=("127.0.0.1",))


class _Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str]
    target = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", type(self).target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        elif self.path == "/drip-headers":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        else:
            cut = self.path == "/cut"
            self.send_response(404 if "missing" in self.path else 200)
            self.send_header("Content-Length", str(len(JPEG) + cut))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(JPEG)
            self.close_connection = cut

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _serve() -> Iterator[tuple[str, list[str]]]:
    _Server.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", _Server.asked
        server.shutdown()


def test_private_hosts_are_refused_until_they_are_named() -> None:
    with _serve() as (url, asked):
        port = url.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"):
            reader = MediaReader(options=QUICK)
            address = f"http://{host}:{port}/a.jpg"
            with pytest.raises(BadSampleError, match=r"not asked.*: --media-hosts public,") as caught:
                reader.read(address, None)
            assert caught.value.reason == "refused_host"
            assert reader.size(address) == 0
        assert asked == []
        for hosts in (("127.0.0.1",), ("public", "127.*"), ("*",)):
            assert MediaReader(MediaRules(hosts=hosts), QUICK).read(f"{url}/a.jpg", None) == JPEG
        with pytest.raises(BadSampleError, match="is none of the media_hosts"):
            MediaReader(MediaRules(hosts=("cdn.example.com",)), QUICK).read(f"{url}/a.jpg", None)


def test_metadata_of_a_cloud_and_names_that_lead_inside_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSampleError, match=r"169\.254\.169\.254 is not public"):
        MediaReader(options=QUICK).read("http://169.254.169.254/latest/meta-data/", None)
    real = socket.getaddrinfo
    with _serve() as (url, asked):
        port = int(url.rpartition(":")[2])
        answers = {"inside.test": "127.0.0.1", "both.test": "127.0.0.1"}

        def resolve(host: str, *args: object, **kwargs: object) -> object:
            found = real(answers.get(host, host), *args, **kwargs)  # type: ignore[arg-type]
            return real("8.8.8.8", *args, **kwargs) + found if host == "both.test" else found  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        for host in answers:
            with pytest.raises(BadSampleError, match=rf"{host} is not public \(127\.0\.0\.1\)"):
                MediaReader(options=QUICK).read(f"http://{host}:{port}/a.jpg", None)
        assert asked == []


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://localhost:{port}/inside.jpg", "refused_host"),
        ("http://169.254.169.254/latest", "refused_host"),
        ("ftp://127.0.0.1/a.jpg", "bad_url"),
        ("file:///etc/hostname", "fetch_failed"),
    ],
)
def test_redirects_are_checked_like_addresses(target: str, reason: str) -> None:
    rules = MediaRules(hosts=("public", "127.0.0.1"))
    with _serve() as (url, asked):
        _Server.target = target.format(port=url.rpartition(":")[2])
        with pytest.raises(BadSampleError) as caught:
            MediaReader(rules, QUICK).read(f"{url}/moved.jpg", None)
        assert caught.value.reason == reason
        assert asked == ["/moved.jpg"]


def test_a_proxy_is_asked_but_not_for_private_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with _serve() as (url, asked):
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert MediaReader(options=QUICK).read("http://no-such-host.invalid/a.jpg", None) == JPEG
        with pytest.raises(BadSampleError, match="is not public"):
            MediaReader(options=QUICK).read("http://127.0.0.1:9/a.jpg", None)
        assert asked == ["http://no-such-host.invalid/a.jpg"]


def test_public_addresses() -> None:
    assert all(map(_is_public, ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808")))
    private = ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "0.0.0.0")
    private += ("224.0.0.1", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")
    assert not any(map(_is_public, private))


@pytest.mark.parametrize("path", ["drip", "drip-headers"])
def test_answers_that_drip_end_at_the_deadline(path: str) -> None:
    with _serve() as (url, _), pytest.raises(BadSampleError) as caught:
        MediaReader(LOCAL, QUICK).read(f"{url}/{path}", None)
    assert caught.value.reason == "fetch_failed"


def test_answers_and_files_have_a_limit_and_are_whole(tmp_path: Path) -> None:
    small = MediaRules(hosts=("127.0.0.1",), limits=MediaLimits(file_bytes=len(JPEG) - 1))
    (tmp_path / "a.jpg").write_bytes(JPEG)
    with _serve() as (url, _):
        for where in (f"{url}/a.jpg", str(tmp_path / "a.jpg"), f"file://{tmp_path}/a.jpg"):
            assert MediaReader(LOCAL, QUICK).read(where, None) == JPEG
            with pytest.raises(BadSampleError, match=r"more bytes than the limit of [\d,]+; media_limits") as caught:
                MediaReader(small, QUICK).read(where, None)
            assert caught.value.reason == "file_too_large"
        with pytest.raises(BadSampleError, match="IncompleteRead"):
            MediaReader(LOCAL, QUICK).read(f"{url}/cut", None)


SECRETS = ("hunter2", "SECRETSIG", "TOKEN42")


def _records(url: str) -> list[dict[str, object]]:
    host = url.removeprefix("http://")
    query = "X-Amz-Signature=SECRETSIG&X-Amz-Credential=TOKEN42"
    places = [
        f"{url}/missing.jpg?{query}",
        f"http://me:hunter2@{host}/missing.jpg",
        f"http://me:hunter2@localhost:1/a b.jpg?{query}",
        f"http://me:hunter2@[bad/x?{query}",
        f"s3://me:hunter2@bucket/x?{query}",
        f"ftp://me:hunter2@host/x?{query}",
        f"file://me:hunter2@host/x?{query}",
        f"{url}/a.jpg?{query}&{'x' * 400}",  # comes, and is no video
    ]
    answer = {"role": "assistant", "content": "this"}
    images = [{"messages": [{"role": "user", "content": "<image>?"}, answer], "images": [each]} for each in places[:-1]]
    return [*images, {"messages": [{"role": "user", "content": "<video>?"}, answer], "videos": places[-1:]}]


def test_no_secret_of_an_address_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in ledgers, manifests, reports, errors or logs, whatever goes wrong with the address."""
    caplog.set_level("DEBUG")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2TOKEN42")
    build_processor("qwen2_5_vl").save_pretrained(tmp_path / "processor")
    with _serve() as (url, _):
        good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in [good, *_records(url)]))
        options = {"store": QUICK, "media_hosts": ("127.0.0.1", "localhost"), "bad_budget": None}
        report = make_shards(data, tmp_path / "out", **options)  # type: ignore[arg-type]
        counted = precount(
            data,
            tmp_path / "counted.jsonl",
            processor=str(tmp_path / "processor"),
            store=QUICK,
            media_hosts=("127.0.0.1", "localhost"),
        )
    assert report.num_dropped == len(_records("http://x")) == len(counted.bad)
    ledger = (tmp_path / "out" / "ledger.jsonl").read_text()
    assert "***@" in ledger
    assert "X-Amz-Signature=***" in ledger
    shown = [ledger, repr(report), json.dumps(report.to_dict()), repr(counted), caplog.text]
    shown += [repr(load_manifest(open_store(str(tmp_path / "out"))))]
    shown += [each.read_bytes().decode("latin-1") for each in (tmp_path / "out").rglob("*") if each.is_file()]
    for text in shown:
        assert [secret for secret in SECRETS if secret in text] == []
