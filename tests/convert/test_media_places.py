"""Media are found where they are named: web addresses as written, escaped file URLs; and stored as what they are."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import threading
from typing import TYPE_CHECKING

import pytest
from PIL import Image, features

from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards, recount, verify_dataset
from vlm_stream.convert.media_bytes import MediaReader, MediaRules
from vlm_stream.errors import BadSampleError
from vlm_stream.format import load_manifest, read_index
from vlm_stream.storage import RetryOptions, StoreOptions, open_store
from vlm_stream.testing import build_processor, make_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JPEG = make_jpeg(30, 40)
QUICK = StoreOptions(retry=RetryOptions(max_retries=2, backoff_s=0.01, max_backoff_s=0.02))


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers a few exact request lines; the path is looked at as it was sent."""

    protocol_version = "HTTP/1.1"
    num_busy = 0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if self.path == "/busy.jpg":
            type(self).num_busy += 1
            code = 503 if self.num_busy < 3 else 200
        elif self.path == "/moved.jpg":
            self.send_response(302)
            self.send_header("Location", "/a%20b.jpg")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        else:
            known = ("/a%20b.jpg", "/a%2520b.jpg", "/signed.jpg?sig=x%2Fy&e=1", "/chunked.jpg", "/%C3%A9.jpg")
            code = {"/private.jpg": 403, "/broken.jpg": 500}.get(self.path, 200 if self.path in known else 404)
        self.send_response(code)
        body = JPEG if code == 200 else b""
        if self.path == "/chunked.jpg":
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _serve() -> Iterator[str]:
    _Server.num_busy = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_web_addresses_are_asked_for_as_they_are_written() -> None:
    reader = MediaReader(MediaRules(hosts=("127.0.0.1",)), QUICK)
    good = ("a%20b.jpg", "a b.jpg", "a%2520b.jpg", "signed.jpg?sig=x%2Fy&e=1", "chunked.jpg", "é.jpg", "moved.jpg")
    with _serve() as url:
        for name in (*good, "busy.jpg"):
            assert reader.read(f"{url}/{name}", None) == JPEG, name
        assert reader.size(f"{url}/a%20b.jpg") == len(JPEG)
        assert reader.size(f"{url}/chunked.jpg") == 0
        for name, reason in (
            ("signed.jpg", "missing_file"),
            ("private.jpg", "no_access"),
            ("broken.jpg", "fetch_failed"),
        ):
            with pytest.raises(BadSampleError) as caught:
                reader.read(f"{url}/{name}", None)
            assert caught.value.reason == reason
    with pytest.raises(BadSampleError, match="could not be fetched"):
        reader.read(f"{url}/a%20b.jpg", None)  # nobody listens any more


def test_escapes_of_file_urls_are_read(tmp_path: Path) -> None:
    (tmp_path / "a b#1.jpg").write_bytes(JPEG)
    url = f"file://{tmp_path}/a%20b%231.jpg"
    assert MediaReader().read(url, None) == JPEG
    assert MediaReader().size(url) == len(JPEG)
    assert MediaReader(MediaRules(confine=True)).read(url, str(tmp_path)) == JPEG
    with pytest.raises(BadSampleError, match="lies outside of"):
        MediaReader(MediaRules(confine=True)).read(f"file://{tmp_path}/%2e%2e/x.jpg", str(tmp_path))
    with pytest.raises(BadSampleError, match="names the host 'host'"):
        MediaReader().read("file://host/x.jpg", None)


def _make_turned_jpeg(height: int, width: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def _write(path: Path, images: list[object], text: str = "<image>what?") -> Path:
    answer = {"role": "assistant", "content": "this"}
    records = [{"messages": [{"role": "user", "content": text}, answer], "images": [image]} for image in images]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_without_its_extension_is_an_image(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 99, 199)).save(buffer, "AVIF")
    (tmp_path / "picture").write_bytes(buffer.getvalue())
    video = {"messages": [{"role": "user", "content": "<video>"}], "videos": [["picture", "picture"]]}
    data = _write(tmp_path / "data.jsonl", ["picture"])
    data.write_text(data.read_text() + json.dumps(video))
    make_shards(data, tmp_path / "out", media_dir=str(tmp_path))
    store = open_store(str(tmp_path / "out"))
    index = read_index(store, load_manifest(store).shards[0])
    assert [index.members(row)[1].name for row in range(2)] == ["0.avif", "0.avif"]


def test_images_are_turned_if_the_conversion_was_told_to(tmp_path: Path) -> None:
    """In the index, by a recount, and in batches, also beside a dataset that is not turned."""
    for name, data in (("side.jpg", _make_turned_jpeg(56, 112)), ("plain.jpg", make_jpeg(56, 112))):
        (tmp_path / name).write_bytes(data)
    processor = build_processor("qwen2_5_vl")
    processor.save_pretrained(tmp_path / "processor")
    data = _write(tmp_path / "data.jsonl", ["side.jpg", "plain.jpg"])
    sizes, grids = {}, {}
    for turned in (False, True):
        out = tmp_path / f"out{turned}"
        make_shards(data, out, media_dir=str(tmp_path), exif_rotate=turned, processor=str(tmp_path / "processor"))
        store = open_store(str(out))
        manifest = load_manifest(store)
        assert json.loads(manifest.job)["exif_rotate"] is turned
        index = read_index(store, manifest.shards[0])
        sizes[turned] = index.media.image_sizes.tolist()
        assert verify_dataset(str(out)).problems == ()
        assert recount(str(out), str(tmp_path / "processor")).num_changed == 0
        loader = StreamLoader(str(out), processor=processor, mode="plain", shuffle=False)
        grids[turned] = [batch["image_grid_thw"][:, 1:].tolist()[0] for batch in loader]
    stored, plain = sizes[False]
    assert sizes[True] == [stored[::-1], plain]
    assert grids[True] == [grids[False][0][::-1], grids[False][1]]
    both = StreamLoader([str(tmp_path / "outTrue"), str(tmp_path / "outFalse")], processor=processor, mode="plain")
    found = sorted(tuple(batch["image_grid_thw"][0, 1:].tolist()) for batch in both)
    assert found == sorted(map(tuple, grids[True] + grids[False]))
