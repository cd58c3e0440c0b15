"""Pages as a browser asks for them: what stands on them, what is refused, and that nothing of a dataset is executed."""

import io
import json
import re
import tarfile
import threading
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from tests.view.conftest import EVIL, open_viewer
from vlm_stream.errors import BadSampleError
from vlm_stream.options import StreamOptions
from vlm_stream.plan import samples_of_step
from vlm_stream.view import viewer as viewer_module
from vlm_stream.view.facts import Query
from vlm_stream.view.frame import LiveLinks
from vlm_stream.view.html import tag
from vlm_stream.view.server import POLICY, make_app
from vlm_stream.view.terminal import _COLOURS, _strip, print_step

VOID = {"meta", "link", "img", "input", "br", "rect", "line", "use"}
OURS = {"html", "head", "body", "title", "script", "style"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = [], [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *pair) for pair in attributes]
        if name not in VOID:
            self._open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *pair) for pair in attributes]

    def handle_endtag(self, name):
        if name not in VOID:
            assert self._open.pop() == name

    def handle_data(self, data):
        self.words.append(data)


def page_of(client, path, status=200):
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    return Reader(answer.text)


def links_of(page, prefix):
    return [value for _, name, value in page.attributes if name in ("href", "src") and (value or "").startswith(prefix)]


def sample_link(viewer, ref):
    (drawn,) = viewer.catalog.draw([ref])
    return LiveLinks().sample(viewer.catalog.name_of(ref, drawn), ref.row)


def test_the_dataset_page_shows_totals_entries_and_a_card_for_each_sample(client, viewer):
    page = page_of(client, "/dataset")
    text = " ".join(page.words)
    for words in ("captions", "clips", "dialogues", "60", "Sources and entries"):
        assert words in text
    assert len(links_of(page, "/sample?")) == 48
    again = page_of(client, links_of(page, "/dataset?at=48")[0])
    assert len(links_of(again, "/sample?")) == 12
    viewer.catalog._scan.join(240)
    bars = links_of(page_of(client, "/dataset/overview"), "/dataset?tokens_from=")
    shown = sum(len(links_of(page_of(client, bar.partition("#")[0]), "/sample?")) for bar in bars)
    assert shown == 60  # each bar of the lengths leads to its own samples


def test_filters_filter(client, viewer):
    for kind, count in (("video", 6), ("text", None)):
        refs = viewer.catalog.page(Query(kind=kind), 0, 100).refs
        assert len(links_of(page_of(client, f"/dataset?kind={kind}"), "/sample?")) == len(refs)
        assert count in (None, len(refs))
    page = page_of(client, "/dataset?text=nothing+like+it")
    while "“Next” reads on from there" in " ".join(page.words):  # on a busy machine time may run out
        page = page_of(client, links_of(page, "/dataset?text=")[-1])
    assert "No sample from here on matches" in " ".join(page.words)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/dataset?kind=smell", "kind='smell' is none of text, image, video, audio"),
        ("/dataset?tokens_from=many", "tokens_from='many' is not a whole number"),
        ("/dataset?source=other", "there is no source 'other' here"),
        ("/sample?source=data&shard=shard-000000.tar&key=none", "there is no sample 'none'"),
        ("/find?key=none", "no source has a sample with the key or the id 'none'"),
        ("/step?step=1000000", "there is no step 1000000 in this plan"),
        ("/step?rank=1&world=0", "world=0 cannot be shown; give a number from 1 to 8,192"),
        ("/step?world=1048576", "world=1,048,576 cannot be shown; give a number from 1 to 8,192"),
        ("/step?micro_batches=999999999999", "micro_batches=999,999,999,999 cannot be shown"),
        ("/step?pack_size=999999999999", "pack_size=999,999,999,999 cannot be shown"),
        ("/step?world=8192&micro_batches=999", "a step of 8,183,808 packs or samples is more than a page can show"),
        ("/compare?window_b=99999999999", "window=99,999,999,999 cannot be shown"),
        ("/step?pack_size=x", "pack_size='x' is not a whole number"),
        ("/step?mode=loud", "mode"),
        ("/step?key=none", "no source has a sample"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(client, path, sentence):
    text = " ".join(page_of(client, path, 400).words)
    assert "This cannot be shown" in text
    assert sentence in text


def test_a_sample_page_counts_what_the_encoder_gives_and_leads_to_its_neighbours(client, viewer):
    refs = viewer.catalog.page(Query(), 0, 60).refs
    for place, ref in enumerate(refs):
        page = page_of(client, sample_link(viewer, ref))
        text = " ".join(page.words)
        assert "✓" in text, text
        assert "✗" not in text
        assert "Token by token" in text
        beside = {n: v for t, n, v in page.attributes if t == "a" and n == "href" and "row=" in (v or "")}
        assert beside or place in (0, 59)
        for picture in links_of(page, "/picture?") + links_of(page, "/frame?"):
            answer = client.get(picture)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
            assert answer.content[:2] == b"\xff\xd8"


def test_the_sample_page_without_a_processor_says_what_is_missing(mixed_shards):
    viewer = open_viewer(mixed_shards)
    client = TestClient(make_app(viewer))
    text = " ".join(page_of(client, sample_link(viewer, viewer.catalog.ref_at(3))).words)
    assert "name the processor (--processor)" in text
    viewer.close()


def test_members_are_served_by_ranges_with_their_own_types(client, viewer):
    (ref, *_) = viewer.catalog.page(Query(kind="video"), 0, 1).refs
    page = page_of(client, sample_link(viewer, ref))
    links = {parse_qs(urlsplit(link).query)["member"][0]: link for link in links_of(page, "/member?")}
    own = next(link for name, link in links.items() if name.endswith("mp4"))
    clip = client.get(own)
    assert (clip.status_code, clip.headers["content-type"]) == (200, "video/mp4")
    part = client.get(own, headers={"range": "bytes=4-11"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (
        206,
        clip.content[4:12],
        f"bytes 4-11/{len(clip.content)}",
    )
    raw = client.get(links["json"])
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["content-disposition"] == "attachment"
    assert json.loads(raw.content)["conversation"]
    for answer in (clip, part, raw):
        assert "sandbox" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get(links["json"].replace("member=json", "member=none")).status_code == 404


def test_a_step_page_has_a_link_for_every_document_and_a_key_leads_to_its_step(client, viewer):
    shape = viewer.options.shape(2)
    for step in (0, 5, 3, 0):
        page = page_of(client, f"/step?step={step}&rank=1&world=2")
        wanted = samples_of_step(viewer.plan.after(0).planner, shape, step, rank=1)
        drawn = viewer.catalog.draw([sample.ref for sample in wanted])
        assert {parse_qs(urlsplit(link).query)["key"][0] for link in links_of(page, "/sample?")} == {
            each.key for each in drawn
        }
        found = page_of(client, f"/step?key={drawn[0].key}&world=2")
        assert f"Step {step}" in " ".join(found.words).replace(",", "")
    built = page_of(client, "/step?step=2&build=1")
    assert "Built: nothing in it is bad." in " ".join(built.words)


@pytest.mark.parametrize("settings", ["mode=grouped&batch_size=4", "mode=plain&batch_size=3", "micro_batches=2&seed=3"])
def test_steps_of_other_plans_are_those_that_a_loader_would_deliver(client, viewer, settings):
    page = page_of(client, f"/step?step=1&{settings}")
    changed = viewer.book.settings(dict(pair.split("=") for pair in settings.split("&")))
    walk = viewer.book.walk(changed)
    wanted = samples_of_step(walk.plan.after(0).planner, changed.options.shape(1), 1)
    keys = {parse_qs(urlsplit(link).query)["key"][0] for link in links_of(page, "/sample?")}
    assert keys == {each.key for each in viewer.catalog.draw([sample.ref for sample in wanted])}


@pytest.mark.parametrize("path", ["/step?step=3", "/compare?pack_size_b=2048", "/step?step=999999", "/step?step=x"])
def test_a_page_that_takes_long_comes_by_itself(mixed_shards, path, monkeypatch):
    """What nobody waits for is made in the background, and is what it would have been; so are sentences."""
    monkeypatch.setattr(viewer_module, "_AGAIN_S", 0.05)
    wanted = TestClient(make_app(open_viewer(mixed_shards))).get(path)
    viewer = open_viewer(mixed_shards)
    viewer.patience_s = 0.0
    client, held = TestClient(make_app(viewer)), threading.Event()
    soon = viewer.soon
    monkeypatch.setattr(viewer, "soon", lambda key, make: soon(key, lambda: (held.wait(60), make())[1]))
    for _ in range(2):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["refresh"]) == (200, "0")
        assert "This page comes by itself" in answer.text
    held.set()
    monkeypatch.setattr(viewer_module, "_AGAIN_S", 120.0)
    answer = client.get(path)
    assert "refresh" not in answer.headers
    assert answer.status_code == wanted.status_code
    first, second = (re.findall(r"<h1>\w+ \w+", each.text) for each in (answer, wanted))
    assert first == second != []
    assert viewer._pending == {}


def test_a_page_that_nobody_came_back_for_is_made_anew(mixed_shards, monkeypatch):
    viewer = open_viewer(mixed_shards)
    viewer.patience_s = 0.0
    made, done = iter("ab"), threading.Event()
    assert viewer.soon("run", lambda: (done.wait(60), next(made))[1]) is None
    done.set()
    viewer._pending["run"][1].result(240)
    monkeypatch.setattr(viewer_module, "_AGAIN_S", -1.0)  # it is old
    viewer.patience_s = 240.0
    assert viewer.soon("run", lambda: next(made)) == "b"
    viewer.close()


def test_two_plans_are_compared_in_pictures(client):
    page = page_of(client, "/compare?pack_size_b=2048&world_a=2&world_b=2")
    text = " ".join(page.words)
    assert "A: pack size 1024" in text
    assert "B: pack size 2048" in text
    assert page.tags.count("svg") > 12


def test_markup_in_any_field_is_text(evil_shards, processor):
    viewer = open_viewer(evil_shards, processor)
    client = TestClient(make_app(viewer))
    paths = [
        "/dataset",
        "/dataset?text=evil",
        f"/dataset?entry={EVIL[:30]}",
        "/step",
        "/step?build=1",
        "/compare?window_b=2",
    ]
    paths += [sample_link(viewer, viewer.catalog.ref_at(place)) for place in range(6)]
    for path in paths:
        page = page_of(client, path)
        assert page.tags.count("script") == 1  # ours
        assert not [each for each in page.attributes if each[1].startswith("on")]
        assert not [each for each in page.attributes if each[2] == "x"]
        assert "\x1b" not in "".join(page.words)
    assert '<script>alert("evil")' in "".join(page_of(client, paths[-1]).words)
    for query in ("/dataset?source=", "/dataset?kind=", "/find?key=", "/step?key=", "/step?mode="):
        page = page_of(client, query + "<script>alert(1)</script>", 400)
        assert page.tags.count("script") == 1
    from vlm_stream.view import show_samples, show_step

    refs = [viewer.catalog.ref_at(place) for place in range(6)]
    step = viewer.book.view(viewer.book.base, 0, 0, is_built=True)
    for shown in (show_samples(viewer, refs), show_step(viewer, step)):
        page = Reader(shown.html)
        assert "script" not in page.tags
        assert not [each for each in page.attributes if each[1].startswith("on")]
        policy = next(value for name, _, value in page.attributes if name == "meta" and "default-src" in (value or ""))
        assert policy.startswith("default-src 'none'; img-src data:")
    viewer.close()


def test_tags_escape_whatever_is_not_markup():
    made = tag("a", EVIL, [EVIL, tag("b", EVIL)], href=EVIL, title=EVIL)
    page = Reader(made)
    assert page.tags == ["a", "b"]
    assert {name for _, name, _ in page.attributes} == {"href", "title"}
    assert tag("p", "\ud800 half").encode()


def test_no_page_of_ours_styles_inline_or_runs_inline(client):
    for path in ("/dataset", "/step", "/compare?window_b=4", "/run"):
        page = page_of(client, path)
        assert not [each for each in page.attributes if each[1] == "style" or each[1].startswith("on")]
        assert "style" not in page.tags


def test_a_bad_sample_is_shown_with_its_reason(tmp_path, toy_meta, saved_processor, processor):
    from vlm_stream.convert import make_shards

    make_shards(toy_meta, tmp_path / "bad", processor=str(saved_processor), samples_per_shard=60)
    viewer = open_viewer(tmp_path / "bad", processor)
    ref = viewer.catalog.page(Query(kind="image"), 0, 1).refs[0]
    (drawn,) = viewer.catalog.draw([ref])
    _, offset, size = next(member for member in drawn.span.members if member[0].endswith("jpg"))
    with (tmp_path / "bad" / drawn.span.path).open("r+b") as tar:
        tar.seek(offset)
        tar.write(b"\x00" * size)
    client = TestClient(make_app(viewer))
    page = page_of(client, sample_link(viewer, ref))
    text = " ".join(page.words)
    assert "A run leaves this sample out." in text
    assert "read: " in text
    assert "Conversation" in text
    assert links_of(page, "/picture?")
    assert client.get(links_of(page, "/picture?")[0]).content[:2] == b"\xff\xd8"  # says why there is none
    where = viewer.book.find(viewer.book.base, [ref])[0]
    built = page_of(client, f"/step?step={where.step}&rank={where.rank}&build=1")
    assert "read: " in " ".join(built.words)
    assert ("a", "href", LiveLinks().sample(viewer.catalog.name_of(ref, drawn))) in built.attributes
    holes = [each for each in built.attributes if each[1] == "class" and "hole" in each[2] and each[0] == "rect"]
    assert len(holes) == 2  # a mark where it would have stood, and the room that it left at the end of the row
    view = viewer.book.view(viewer.book.base, where.step, where.rank, is_built=True)
    strip = Console(file=io.StringIO(), width=100)
    print_step(strip, view)
    assert "hole: a bad sample" in strip.file.getvalue()
    assert f"{drawn.key}: " in strip.file.getvalue()
    (row,) = [row for row in view.micro_batches[where.micro] if any(each.hole for each in row.documents)]
    colours = {span.style for span in _strip(row, 400).spans}
    assert {_COLOURS["hole"], _COLOURS["label"]} <= colours
    with pytest.raises(BadSampleError):
        viewer.samples.picture(ref, 0)
    viewer.close()


def test_tars_of_no_known_layout_show_their_members_and_markup_is_a_download(tmp_path):
    members = {"a.npy": b"123", "b.svg": b"<svg onload=alert(1)></svg>", "c.html": b"<script>alert(1)</script>"}
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key in ("s0", "s1"):
            for name, data in members.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    viewer = open_viewer(tmp_path / "x.tar")
    client = TestClient(make_app(viewer))
    assert len(links_of(page_of(client, "/dataset"), "/sample?")) == 2
    page = page_of(client, "/find?key=s1")
    assert "Its members make no conversation" in " ".join(page.words)
    assert "A run leaves" not in " ".join(page.words)
    links = {parse_qs(urlsplit(link).query)["member"][0]: link for link in links_of(page, "/member?")}
    assert links.keys() == members.keys()
    for name, link in links.items():
        answer = client.get(link)
        assert answer.content == members[name]
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == "attachment"
    viewer.close()


def test_an_error_of_ours_is_a_page_too(viewer, client, monkeypatch, caplog):
    def fail(*_args, **_more):
        raise ZeroDivisionError("<b>by zero</b>")

    monkeypatch.setattr(viewer.book, "view", fail)
    assert "ZeroDivisionError: <b>by zero</b>" in " ".join(page_of(client, "/step", 500).words)
    assert "could not make /step" in caplog.text
    monkeypatch.setattr(viewer.samples, "picture", fail)
    ref = viewer.catalog.page(Query(kind="image"), 0, 1).refs[0]
    answer = client.get(sample_link(viewer, ref).replace("/sample", "/picture") + "&number=7")
    assert (answer.status_code, answer.content[:2]) == (200, b"\xff\xd8")
    assert answer.headers["cache-control"] == "no-store"


def test_a_rank_that_is_not_there_is_said(client):
    text = " ".join(page_of(client, "/step?rank=99&world=8").words)
    assert "There is no rank 99 among 8" in text
    assert "rank 7 of 8" in text


@pytest.mark.parametrize("asked", ["bytes=9-5", "bytes=\u00b2-", "bytes=1-2,5-6", "bytes=-", "lines=1-2"])
def test_a_range_that_means_nothing_is_the_whole(client, viewer, asked):
    link = sample_link(viewer, viewer.catalog.ref_at(0)).replace("/sample", "/member") + "&member=json"
    answer = client.get(link, headers={"range": asked.encode("latin-1")})
    assert (answer.status_code, "content-range" in answer.headers) == (200, False)


@pytest.mark.parametrize("asked", ["bytes=-0", "bytes=1000000-"])
def test_a_range_past_the_end_is_refused(client, viewer, asked):
    link = sample_link(viewer, viewer.catalog.ref_at(0)).replace("/sample", "/member") + "&member=json"
    size = len(client.get(link).content)
    answer = client.get(link, headers={"range": asked})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}")


def test_costs_are_shown_where_ranks_wait_and_for_each_part_of_a_pipeline(mixed_shards):
    options = StreamOptions(mode="plain", batch_size=4, micro_batches=2, barrier="micro", pp_microbatches=2)
    viewer = open_viewer(mixed_shards, options=options, world=2)
    view = viewer.book.view(viewer.book.base, 1, 1)
    for number in (0, 1):
        assert sum(micro[number][0] for micro in view.by_micro) == pytest.approx((view.llm, view.vit)[number][0])
    for micro, rows in enumerate(view.micro_batches):
        documents = [each for row in rows for each in row.documents]
        assert sum(each.llm for each in documents) == pytest.approx(view.by_micro[micro][0][1], rel=1e-3)
        assert sum(each.vit for each in documents) == pytest.approx(view.by_micro[micro][1][1], rel=1e-3)
        assert [row.pipeline for row in rows] == [0, 0, 1, 1]
    labels = [value for _, name, value in page_of(TestClient(make_app(viewer)), "/step?step=1").attributes]
    assert sum("Language model, ranks in this micro-batch" in str(each) for each in labels) == 2
    assert sum("Vision tower, the pipeline's micro-batches" in str(each) for each in labels) == 2
    viewer.close()
