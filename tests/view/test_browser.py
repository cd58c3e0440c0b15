"""The viewer in a real browser: pages open, filters filter, clicks and keys arrive, nothing of a dataset runs.

`make browser` runs these. `make screenshots` also keeps the pictures of docs/viewer.md.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from tests.view.conftest import open_viewer
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.options import StreamOptions
from vlm_stream.testing import build_processor, make_toy_dataset, make_wav
from vlm_stream.view import ViewServer, show_samples
from vlm_stream.view.facts import Query
from vlm_stream.view.terminal import print_sample

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOTS = os.environ.get("VLM_STREAM_SCREENSHOTS") and Path(os.environ["VLM_STREAM_SCREENSHOTS"]).resolve()
LIMITS = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}}
PAGES = (
    "/dataset",
    "/dataset?kind=video",
    "/step?step=1&rank=3",
    "/step?step=1&build=1",
    "/compare?window_b=64",
    "/run",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        assert not os.environ.get("VLM_STREAM_WANTS_CHROMIUM"), "no Chromium is installed: apt-get install chromium"
        pytest.skip("no Chromium is installed (apt-get install chromium), so no page was looked at")
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """Toy data under names that stand on pictures: relative ones."""
    before, folder = Path.cwd(), Path("my-data")
    os.chdir(tmp_path_factory.mktemp("browser"))
    processor = build_processor("qwen2_5_vl", image=LIMITS, video=LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=640, seed=4)
    make_shards(meta, folder / "shards", processor=str(folder / "processor"), samples_per_shard=80, shuffle=1)
    yield folder / "shards", processor
    os.chdir(before)


@pytest.fixture(scope="module")
def server(data: tuple[Path, Any]) -> Iterator[ViewServer]:
    shards, processor = data
    options = StreamOptions(pack_size=2048, micro_batches=2)
    with ViewServer(open_viewer(shards, processor, options=options, world=8)).start() as found:
        yield found


TERMINAL = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 0; padding: 18px; background: #16191f; color: #e7eaf0; }}
pre {{ margin: 0; font: 13px/15px "DejaVu Sans Mono", monospace; }}</style><pre><code>{code}</code></pre>"""
LOADED = "(v => { v.preload = 'auto'; return v.readyState === 4; })(document.querySelector('video'))"
# A clip whose first picture is shown.


def longest_clip(catalog: Any) -> str:
    alone = [each for each in catalog.draw(catalog.page(Query(kind="video"), 0, 48).refs) if not each.sizes.images]
    return max(alone, key=lambda each: each.sizes.videos[0].frames).key


WITHOUT_FOLDER = """folder => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data.replaceAll(folder, "");
}"""


class Tab:
    """A page, and everything that went wrong on it."""

    def __init__(self, browser: Any, base: str, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.base = base.rstrip("/")
        self.wrong: list[str] = []
        self.page.on(
            "console", lambda line: self.wrong.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog: " + dialog.message), dialog.dismiss()))
        self.page.on("requestfailed", self._failed)
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:", "file:")):
            self.wrong.append("asked elsewhere: " + request.url)

    def _failed(self, request: Any) -> None:
        # Players end a request once they have enough, and a click ends what a page still asks for.
        if request.resource_type != "media" and request.failure != "net::ERR_ABORTED":
            self.wrong.append("failed: " + request.url)

    def open(self, path: str) -> Any:
        answer = self.page.goto(self.base + path)
        self.page.wait_for_load_state("networkidle")
        return answer

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.wrong == []

    def shot(self, name: str, height: int = 860) -> None:
        """Keep a picture of the top of a page for the docs, in the form that its name ends in."""
        size = self.page.viewport_size
        self.page.set_viewport_size({"width": size["width"], "height": height})
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate(WITHOUT_FOLDER, f"{Path.cwd()}/")
        data = self.page.screenshot()
        self.page.set_viewport_size(size)
        if SHOTS:
            from PIL import Image

            picture = Image.open(BytesIO(data)).convert("RGB")
            how = {"quality": 72, "subsampling": 0, "optimize": True} if name.endswith("jpg") else {"optimize": True}
            picture.save(SHOTS / f"viewer-{name}", **how)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_every_page_opens_fits_and_says_nothing_to_the_console(browser, server, width, scheme):
    with Tab(browser, server.url, width=width, scheme=scheme) as tab:
        catalog = server.viewer.catalog
        samples = [catalog.page(Query(kind=kind), 0, 1).refs[0] for kind in ("image", "video", "text")]
        keys = [catalog.draw([ref])[0].key for ref in samples]
        for path in (*PAGES, *(f"/find?key={key}" for key in keys)):
            assert tab.open(path).status == 200, path
            page = tab.page
            assert page.locator("h1").count() == 1
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 1, f"{path} is {wide} pixels wider than the window"
            broken = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
            assert broken == []
        if width == 390:
            tab.open(f"/find?key={longest_clip(catalog)}")
            tab.page.wait_for_function(LOADED, timeout=15_000)
            tab.page.wait_for_timeout(1500)  # the player's wheel goes
            tab.shot("narrow.jpg", 900)


def test_histograms_come_by_themselves_and_a_bar_leads_to_its_samples(browser, data):
    shards, processor = data
    fresh = open_viewer(shards, processor, options=StreamOptions(pack_size=2048))
    with ViewServer(fresh).start() as server, Tab(browser, server.url) as tab:
        tab.open("/dataset")
        tab.page.wait_for_selector("svg.histogram >> nth=2", timeout=20_000)
        tab.page.wait_for_selector("[data-renew]:not([data-every])", state="attached", timeout=20_000)
        tab.shot("dataset.jpg", 1240)
        bar = tab.page.locator("svg.histogram a").nth(3)
        count = int(bar.locator("title").text_content().rpartition(": ")[2])
        bar.click()
        tab.page.wait_for_url("**tokens_from=**")
        assert f"{count} samples match" in tab.page.locator("[data-says]").first.text_content()


def test_filters_filter(browser, server):
    with Tab(browser, server.url) as tab:
        tab.open("/dataset")
        page = tab.page
        page.select_option("select[name=kind]", "video")
        page.select_option("select[name=entry]", "clips")
        page.fill("input[name=tokens_from]", "100")
        page.click("button.main")
        page.wait_for_load_state("networkidle")
        wanted = server.viewer.catalog.page(Query(kind="video", entry="clips", tokens_from=100), 0, 48).refs
        assert page.locator("a.card").count() == len(wanted) > 0
        assert page.locator("a.card .badge.video").count() == len(wanted)
        page.fill("input[name=text]", "river")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=river**")
        page.wait_for_load_state("networkidle")
        assert 0 < page.locator("a.card").count() < len(wanted)
        page.click("text=Clear")
        page.wait_for_url("**/dataset")
        page.wait_for_load_state("networkidle")
        assert page.locator("a.card").count() == 48


def test_a_click_on_a_document_arrives_at_its_sample(browser, server):
    with Tab(browser, server.url) as tab:
        tab.open("/step?step=1&rank=3")
        document = tab.page.locator("svg.strip a").nth(2)
        title = document.locator("title").first.text_content()
        document.click(force=True)
        tab.page.wait_for_url("**/sample?**")
        assert tab.page.locator(".crumbs").text_content() == title.partition(":")[0].partition(" (")[0]
        tab.page.click("text=where in the run")
        tab.page.wait_for_url("**/step?key=**")
        assert "Step 1 of" in tab.page.locator("h1").text_content()
        assert "rank 3" in tab.page.locator("h1").text_content()
        tab.page.locator("svg.ranks").first.locator("a").nth(6).click(force=True)
        tab.page.wait_for_url("**rank=6**")
        tab.page.click("text=Build it")
        tab.page.wait_for_url("**build=1**")
        assert tab.page.locator("svg.strip rect.label").count() > 3


def best_seen(viewer: Any, ref: Any) -> float:
    """Return how far a sample is from a step in which padding is seen, and which is not the last one."""
    (found, *_) = viewer.book.find(viewer.book.base, [ref])
    return abs(viewer.book.view(viewer.book.base, found.step, found.rank).fill - 0.85) + (found.step > 4)


def test_padding_and_a_hole_are_seen(browser, data):
    """A small window packs worse, and the bytes of one image are damaged."""
    shards, processor = data
    own = shards.parent / "one-damaged"
    shutil.copytree(shards, own)
    options = StreamOptions(pack_size=2048, micro_batches=2, window=24)
    viewer = open_viewer(own, processor, options=options, world=8)
    refs = viewer.catalog.page(Query(kind="image", tokens_from=150), 0, 200).refs
    ref = min(refs, key=partial(best_seen, viewer))
    (drawn,) = viewer.catalog.draw([ref])
    begin = next(begin for name, begin, _ in drawn.members if name.endswith(("jpg", "png")))
    with (own / drawn.span.path).open("r+b") as tar:
        tar.seek(begin)
        tar.write(b"\xff" * 200)
    (where, *_) = viewer.book.find(viewer.book.base, [ref])
    with ViewServer(viewer).start() as server, Tab(browser, server.url) as tab:
        tab.open(f"/step?step={where.step}&rank={where.rank}")
        assert tab.page.locator("svg.strip rect.pad").count() == 2
        assert tab.page.locator(".numbers-below .chosen").first.text_content() == str(where.rank)
        tab.shot("step.png", 1000)
        tab.open(f"/step?step={where.step}&rank={where.rank}&build=1")
        assert tab.page.locator("svg.strip rect.hole").count() == 2
        tab.shot("step-built.png", 1000)


def test_the_terminal_shows_a_sample(browser, server, tmp_path):
    """As a terminal of 24-bit colours draws it, with half blocks for pictures."""
    ref = server.viewer.catalog.page(Query(kind="image", tokens_from=100), 0, 1).refs[0]
    console = Console(
        file=StringIO(), record=True, width=104, force_terminal=True, color_system="truecolor", highlight=False
    )
    (drawn,) = server.viewer.catalog.draw([ref])
    console.print(f"$ vlm-stream show shards/ --key {drawn.id} --processor Qwen/Qwen2.5-VL-3B-Instruct", style="bold")
    print_sample(console, server.viewer, server.viewer.samples.read(ref), "blocks")
    page = console.export_html(theme=DIMMED_MONOKAI, code_format=TERMINAL)
    (tmp_path / "show.html").write_text(page, encoding="utf-8")
    with Tab(browser, "file://", width=880) as tab:
        tab.page.goto((tmp_path / "show.html").as_uri())
        assert tab.page.locator("pre").text_content().count("▀") > 300
        height = tab.page.evaluate("document.querySelector('pre').scrollHeight")
        tab.shot("terminal.png", height + 24)


def test_keys_are_enough(browser, server):
    with Tab(browser, server.url) as tab:
        page = tab.page
        tab.open("/dataset")
        page.keyboard.press("ArrowRight")
        page.wait_for_url("**at=48**")
        page.wait_for_load_state("networkidle")
        page.keyboard.press("j")
        page.keyboard.press("j")
        chosen = page.evaluate("document.activeElement.getAttribute('href')")
        page.keyboard.press("Enter")
        page.wait_for_url("**/sample?**")
        page.wait_for_load_state("networkidle")
        assert page.url.endswith(chosen)
        page.keyboard.press("t")
        assert page.locator("details.by-token").get_attribute("open") is not None
        assert page.locator(".tokens span").first.is_visible()
        before = page.url
        page.keyboard.press("n")
        page.wait_for_function("url => location.href !== url", arg=before)
        page.keyboard.press("s")
        page.wait_for_url("**/step")
        page.keyboard.press("ArrowDown")
        page.wait_for_url("**rank=1**")
        page.keyboard.press("?")
        assert page.locator("dialog").is_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.tagName") == "INPUT"


def test_samples_show_their_media(browser, server, tmp_path, data):
    catalog = server.viewer.catalog
    with Tab(browser, server.url) as tab:
        clip, picture = (catalog.page(Query(kind=kind, tokens_from=100), 0, 1).refs[0] for kind in ("video", "image"))
        tab.open(f"/find?key={catalog.draw([clip])[0].key}")
        tab.page.wait_for_function("document.querySelector('video').readyState >= 1", timeout=15_000)
        assert tab.page.locator(".frames img").count() >= 4
        tab.open(f"/find?key={catalog.draw([picture])[0].key}")
        tab.shot("sample.jpg", 900)
        tab.page.locator("details.by-token summary").click()
        tab.page.locator("h2", has_text="What the model reads").evaluate("part => part.scrollIntoView()")
        tab.shot("tokens.jpg", 600)
    with Tab(browser, server.url, scheme="dark") as tab:
        tab.open(f"/find?key={longest_clip(catalog)}")
        tab.page.wait_for_function(LOADED, timeout=15_000)
        tab.page.wait_for_timeout(1500)
        tab.shot("sample-dark.jpg", 860)
    (tmp_path / "a.wav").write_bytes(make_wav(seconds=0.5))
    turns = [{"role": "user", "content": "<audio>What is it?"}, {"role": "assistant", "content": "A tone."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns, "audios": [str(tmp_path / "a.wav")]}) + "\n")
    make_shards(tmp_path / "a.jsonl", tmp_path / "sound")
    with ViewServer(open_viewer(tmp_path / "sound")).start() as own, Tab(browser, own.url) as tab:
        tab.open("/find?key=000000000")
        seconds = tab.page.evaluate(
            "new Promise(done => { const a = document.querySelector('audio'); a.preload = 'metadata';"
            " a.onloadedmetadata = () => done(a.duration); a.load(); })"
        )
        assert abs(seconds - 0.5) < 0.01


def test_compared_plans(browser, server):
    with Tab(browser, server.url) as tab:
        tab.open("/compare")
        tab.page.fill("input[name=window_b]", "8")
        tab.page.click("button.main")
        tab.page.wait_for_url("**window_b=8**")
        assert tab.page.locator(".meter").count() == 12
        tab.shot("compare.png", 1060)


def test_markup_of_a_dataset_never_runs(browser, evil_shards, processor):
    viewer = open_viewer(evil_shards, processor)
    with ViewServer(viewer).start() as server, Tab(browser, server.url) as tab:
        names = [viewer.catalog.draw([viewer.catalog.ref_at(place)])[0].key for place in range(6)]
        for path in ("/dataset", "/step?build=1", *(f"/find?key={name}" for name in names)):
            assert tab.open(path).status == 200
            assert tab.page.evaluate("document.querySelectorAll('script').length") == 1
            assert tab.page.evaluate("document.querySelector('img[src=x]')") is None
        assert "<script>alert" in tab.page.locator(".bubble").first.text_content()


def test_a_running_loader_is_watched_and_a_bad_sample_is_a_click_away(browser, data):
    shards, processor = data
    own = shards.parent / "damaged"
    shutil.copytree(shards, own)
    for damaged in own.glob("*.tar"):
        with damaged.open("r+b") as tar:
            tar.seek(2000)
            tar.write(b"\xff" * 20_000)
    sources = {"clean": {"url": str(shards), "weight": 2}, "damaged": {"url": str(own), "weight": 1}}
    loader = StreamLoader(
        sources, processor=processor, epochs=3, pack_size=2048, window=64, num_workers=2, bad_budget=None
    )
    with loader, loader.serve_view() as server, Tab(browser, server.url) as tab:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        tab.open("/run")
        before = tab.page.locator(".tile b").first.text_content()
        while loader.ledger.num_bad < 8 or loader.metrics()["batches"] < 240:
            next(batches)
            until = time.monotonic() + 2
            while loader.metrics()["ready_batches"] < 3 and time.monotonic() < until:
                time.sleep(0.02)  # a model that trains, and takes longer than its batches
        tab.page.wait_for_function(
            "text => document.querySelector('.tile b').textContent !== text", arg=before, timeout=10_000
        )
        deadline = time.monotonic() + 10
        while not tab.page.locator("td a[href*='source=damaged']").count() and time.monotonic() < deadline:
            time.sleep(0.2)
        tab.shot("run.png", 1180)
        with Tab(browser, server.url, width=390, scheme="dark") as narrow:
            narrow.open("/run")
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert narrow.page.evaluate(wide) <= 1
            assert narrow.page.locator("h3", has_text="Builders").is_visible()
        tab.page.locator("td a[href*='source=damaged']").first.click()
        tab.page.wait_for_url("**/sample?source=damaged**")
        assert "A run leaves this sample out." in tab.page.locator(".note.bad").text_content()


def test_one_file_is_whole_without_a_server(browser, server, tmp_path):
    catalog = server.viewer.catalog
    ref = catalog.page(Query(kind="image"), 0, 1).refs[0]
    show_samples(server.viewer, [ref]).save(tmp_path / "sample.html")
    with Tab(browser, "file://") as tab:
        tab.page.goto((tmp_path / "sample.html").as_uri())
        tab.page.wait_for_load_state("networkidle")
        assert tab.page.evaluate("document.images[0].naturalWidth") > 0
        assert tab.page.evaluate("getComputedStyle(document.querySelector('.bubble')).borderRadius") == "12px"
