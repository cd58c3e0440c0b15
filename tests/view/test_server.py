"""Who may ask, and where the server listens."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from tests.waiting import wait_for
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.errors import ConfigError
from vlm_stream.options import StreamOptions
from vlm_stream.storage import open_store
from vlm_stream.testing import make_mp4
from vlm_stream.view import ViewServer, routes, server
from vlm_stream.view import viewer as viewer_module
from vlm_stream.view.facts import Query
from vlm_stream.view.html import url
from vlm_stream.view.server import make_app


def test_with_a_token_nobody_comes_in_without_it(viewer):
    client = TestClient(make_app(viewer, token="secret"), follow_redirects=False)
    for path in (
        "/dataset",
        "/static/view.css",
        "/member?source=data",
        "/dataset?token=wrong",
        "/dataset?token=sécret",
    ):
        answer = client.get(path)
        assert answer.status_code == 403
        assert "with the token" in answer.text
    answer = client.get("/dataset?token=secret&kind=video")
    assert (answer.status_code, answer.headers["location"]) == (303, "/dataset?kind=video")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/dataset?kind=video").status_code == 200


def test_another_name_for_this_machine_is_refused_and_nothing_is_written(viewer):
    hosts = frozenset(("127.0.0.1",))
    assert TestClient(make_app(viewer, hosts=hosts), base_url="http://127.0.0.1").get("/run").status_code == 200
    assert TestClient(make_app(viewer, hosts=hosts), base_url="http://evil.example").get("/run").status_code == 421
    assert TestClient(make_app(viewer)).post("/dataset").status_code == 405
    assert TestClient(make_app(viewer)).get("/static/../viewer.py").status_code == 404
    assert TestClient(make_app(viewer)).get("/static/none").status_code == 404


def test_a_real_server_answers_and_its_port_is_its_own(mixed_shards):
    with ViewServer(open_viewer(mixed_shards)).start() as running:
        assert running.token is None
        with urllib.request.urlopen(running.url, timeout=240) as answer:
            assert answer.status == 200
        with pytest.raises(ConfigError, match="the viewer cannot listen at 127"):
            ViewServer(running.viewer, port=running.port)


def test_elsewhere_the_url_has_the_token(mixed_shards):
    with ViewServer(open_viewer(mixed_shards), host="0.0.0.0").start() as running:
        assert running.token
        assert running.token in running.url
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{running.port}/dataset", timeout=240)


def test_a_loader_serves_its_run_and_shows_its_batches(mixed_shards, processor):
    sources = {"a": {"url": str(mixed_shards), "weight": 3}, "b": {"url": str(mixed_shards), "weight": 1}}
    loader = StreamLoader(sources, processor=processor, pack_size=1024, with_refs=True)
    with loader, loader.serve_view() as running:
        batches = iter(loader)
        taken = [next(batches) for _ in range(3)]
        client = TestClient(make_app(running.viewer))
        text = client.get("/run").text
        for words in ("Running", "tokens a second", "75.00%", "Nothing was bad", 'data-renew="/run/now"'):
            assert words in text
        assert client.get("/run/now").status_code == 200
        assert "Step 3" in client.get("/step").text  # the next one
        shown = loader.show(taken[0])
        for source, _shard, key, *_ in taken[0]["refs"][0]:
            assert f"<td>{key}</td>" in shown.html
            assert source in "ab"
        assert shown.html.count("data:image/jpeg;base64,") >= len(taken[0]["image_grid_thw"]) > 0
        assert shown._repr_html_().startswith("<iframe srcdoc=")
        assert "<script" not in shown.html
        with pytest.raises(ConfigError, match="nothing to read in it"):
            loader.show({"pixel_values": taken[0]["pixel_values"]})
    del batches, taken


def test_the_viewer_does_not_keep_a_dropped_loader_alive(mixed_shards, processor):
    loader = StreamLoader(mixed_shards, processor=processor, pack_size=1024)
    with loader.serve_view() as running:
        assert running.viewer.run() is not None
        del loader
        assert running.viewer.run() is None


def test_large_members_are_streamed_in_pieces(viewer, monkeypatch):
    monkeypatch.setattr(server, "_MAX_PIECE", 1000)
    catalog = viewer.catalog
    ref = catalog.page(Query(kind="video"), 0, 1).refs[0]
    (drawn,) = catalog.draw([ref])
    name = next(each for each, *_ in drawn.span.members if each.endswith("mp4"))
    whole = catalog.read_member(drawn, name)
    link = url("/member", **catalog.name_of(ref, drawn)._asdict(), member=name)
    client = TestClient(make_app(viewer))
    answer = client.get(link)
    assert (answer.content, answer.headers["content-length"]) == (whole, str(len(whole)))
    part = client.get(link, headers={"range": "bytes=500-"})
    assert (part.status_code, part.content) == (206, whole[500:1500])
    assert part.headers["content-range"] == f"bytes 500-1499/{len(whole)}"


def test_pages_over_s3_read_ranges_and_never_a_shard(mixed_shards, processor, s3_server):
    store = open_store(s3_server.url("viewed"), s3_server.options)
    for path in sorted(mixed_shards.iterdir()):
        if path.is_file():
            store.put(path.name, path.read_bytes())
    options = StreamOptions(pack_size=1024, store=s3_server.options)
    viewer = open_viewer(s3_server.url("viewed"), processor, options=options)
    client = TestClient(make_app(viewer))
    ref = viewer.catalog.page(Query(kind="image"), 0, 1).refs[0]
    (drawn,) = viewer.catalog.draw([ref])
    link = url("/sample", **viewer.catalog.name_of(ref, drawn)._asdict())
    before = viewer.catalog._reader.metrics.bytes_read
    assert "✓" in client.get(link).text
    assert 0 < viewer.catalog._reader.metrics.bytes_read - before <= 2 * drawn.span.size
    assert client.get("/step?step=3").status_code == 200
    assert client.get(link.replace("/sample", "/thumb")).content[:2] == b"\xff\xd8"
    assert client.get("/dataset?text=river").status_code == 200
    viewer.close()


def test_several_may_look_at_a_time(viewer):
    refs = [viewer.catalog.ref_at(place) for place in range(16)]
    names = [viewer.catalog.name_of(ref, drawn) for ref, drawn in zip(refs, viewer.catalog.draw(refs), strict=True)]
    paths = [url("/sample", **name._asdict()) for name in names] + ["/step?step=1&build=1", "/step?step=2&build=1"] * 2
    client = TestClient(make_app(viewer))
    with ThreadPoolExecutor(8) as pool:
        pages = list(pool.map(lambda path: client.get(path).text, paths))
    assert all("✓" in page or "Built: nothing in it is bad." in page for page in pages)


def test_two_viewers_of_one_host_let_the_same_browser_in(viewer):
    answers = [
        TestClient(make_app(viewer, token=token), follow_redirects=False).get(f"/dataset?token={token}")
        for token in ("first", "second")
    ]
    names = {answer.headers["set-cookie"].partition("=")[0] for answer in answers}
    assert len(names) == 2  # one does not replace the other


def test_in_a_trainer_nothing_is_read_before_somebody_looks(mixed_shards, processor):
    loader = StreamLoader(mixed_shards, processor=processor, pack_size=1024)
    with loader, loader.serve_view() as running:
        viewer = running.viewer
        assert viewer.catalog._scan is None
        assert viewer.book.run_walk()._walker is None
        assert viewer.pace.share == 0.1
        TestClient(make_app(viewer)).get("/dataset")
        assert viewer.catalog._scan is not None


def test_what_first_pages_need_is_there_before_somebody_asks(mixed_shards, processor):
    viewer = open_viewer(mixed_shards, processor)
    for make in routes.first_pages(viewer):
        make()
    seen = []
    viewer.warm(lambda: seen.append("first") or 1 / 0, lambda: seen.append("second"))
    with ViewServer(open_viewer(mixed_shards, processor)).start() as running:
        book, catalog = running.viewer.book, running.viewer.catalog
        wait_for(lambda: book.run_walk().total is not None)
        wait_for(lambda: len(catalog.known_facts()) == len(catalog.scanned_shards))
    wait_for(lambda: seen == ["first", "second"])  # what fails is told by the page that needs it
    viewer.close()
    viewer.warm(lambda: seen.append("third"))
    assert seen == ["first", "second"]


def test_a_thread_in_the_background_rests_as_long_as_its_share_says(monkeypatch):
    slept = []
    monkeypatch.setattr(viewer_module.time, "sleep", slept.append)
    monkeypatch.setattr(viewer_module.time, "monotonic", lambda: 10.02)
    viewer_module.Pace(0.1).rest(10.0)
    viewer_module.Pace(0.1).rest(0.0)  # bounded
    viewer_module.Pace().rest(0.0)  # all of it
    assert slept == [pytest.approx(0.18), 1.0]


def test_a_thread_in_the_background_waits_for_the_page_that_is_made(viewer, monkeypatch):
    monkeypatch.setattr(viewer_module, "_MAX_REST", 240.0)
    rested, seen = threading.Event(), []
    resting = threading.Thread(target=lambda: (viewer.pace.rest(0.0), rested.set()), daemon=True)

    def overview(_viewer, _values):
        resting.start()
        seen.append(rested.wait(0.2))
        return ""

    monkeypatch.setitem(routes.PAGES, "/run/now", overview)
    assert TestClient(make_app(viewer)).get("/run/now").status_code == 200
    resting.join(240)
    assert seen == [False]
    assert rested.is_set()


def test_a_thread_in_the_background_waits_until_a_page_has_its_pictures(monkeypatch):
    monkeypatch.setattr(viewer_module, "_MAX_REST", 240.0)
    monkeypatch.setattr(viewer_module, "_QUIET_S", 0.5)
    pace = viewer_module.Pace()
    with pace.page():
        pass
    begin = time.monotonic()
    pace.rest(begin)
    assert time.monotonic() - begin >= 0.3


def test_what_cannot_be_bound_names_the_way_out(viewer):
    with pytest.raises(ConfigError, match="choose another --host"):
        ViewServer(viewer, "203.0.113.7", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another --port"):
        ViewServer(viewer, "127.0.0.1", taken.getsockname()[1])


def test_a_player_stands_where_browsers_can_play(tmp_path):
    """What they cannot is seen by its frames, and can be fetched."""
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A clip."}]
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    (tmp_path / "b.mp4").write_bytes(make_mp4(num_frames=8))
    command = ["ffmpeg", "-loglevel", "error", "-i", tmp_path / "b.mp4", "-c", "copy", tmp_path / "a.mkv"]
    subprocess.run(command, check=True, timeout=60)
    records = [{"messages": turns, "videos": [str(tmp_path / name)]} for name in ("a.mkv", "b.mp4")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_shards(tmp_path / "a.jsonl", tmp_path / "shards", workers=1)
    viewer = open_viewer(tmp_path / "shards")
    client = TestClient(make_app(viewer))
    drawn = viewer.catalog.draw([viewer.catalog.ref_at(place) for place in (0, 1)])
    pages = [client.get(url("/find", key=each.key)).text for each in drawn]
    names = [name for each in drawn for name, *_ in each.members if name.startswith("0.")]
    assert ["<video" in page for page in pages] == [False, True], names
    assert all('class="frames"' in page and "member=0." in page for page in pages)
    viewer.close()
