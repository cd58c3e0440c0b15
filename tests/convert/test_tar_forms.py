"""Tars whose JSON has any form that files may have: the same samples with the same images as the file would give."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.convert.test_any_file import NUM, RECORDS, ROWS, llava
from tests.foreign_tars import write_tar
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import IndexOptions, index_tars
from vlm_stream.errors import ConfigError, DatasetError
from vlm_stream.format import FieldMap, load_manifest
from vlm_stream.ledger import BadSample
from vlm_stream.storage import open_store
from vlm_stream.testing import make_jpeg, make_mp4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMS = {name: form for name, form in {**RECORDS, **ROWS}.items() if name != "OpenAI audio"}  # its bytes are text
IMAGE = make_jpeg(20, 30)


def in_tar(value: Any, i: int, *, named: bool) -> Any:
    """Return a record whose media are members: it names them, or leaves that to their places."""
    if isinstance(value, list):
        return [in_tar(each, i, named=named) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, part in value.items():
        if key in ("image", "images", "image_url"):
            if named:
                name = f"{i}.jpg"
                found[key] = [name] if isinstance(part, list) else {"url": name} if key == "image_url" else name
        else:
            found[key] = in_tar(part, i, named=named)
    return found


def write(folder: Path, make: Callable[[int], Any], shows: str, *, named: bool = False) -> str:
    samples = []
    for i in range(NUM):
        members = {"jpg": make_jpeg(20, 30 + i)} if shows == "image" or (shows == "half" and i % 2) else {}
        data = in_tar(make(i), i, named=named)
        samples.append((f"{i:04}", {"json": json.dumps(data).encode(), **members}))
    return str(write_tar(folder / "x.tar", samples))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_inside_a_tar(name: str, named: bool, tmp_path: Path) -> None:
    make, _, shows = FORMS[name]
    loader = StreamLoader(write(tmp_path, make, shows, named=named), processor=None, mode="plain", batch_size=4)
    samples = [sample for batch in loader for sample in batch["samples"]]
    assert len(samples) == NUM
    shown = {}
    for sample in samples:
        items = [item for turn in sample.conversation() for item in turn["content"]]
        shown[int(sample.key)] = [item["image"] for item in items if item["type"] == "image"]
        assert [item["text"] for item in items if item["type"] == "text"]
    has_image = {"image": range(NUM), "half": range(1, NUM, 2)}.get(shows, ())
    assert shown == {i: [make_jpeg(20, 30 + i)] if i in has_image else [] for i in range(NUM)}


CHATS: dict[str, Callable[[int], Any]] = {
    "conversations": lambda i: {"conversations": llava(i, "What?")},
    "messages": lambda i: {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    "conversation": lambda i: {
        "conversation": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    },
}


@pytest.mark.parametrize("name", CHATS)
def test_images_that_nothing_shows_are_told_and_not_lost(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = write(tmp_path, CHATS[name], "image")
    with pytest.raises(ConfigError, match=r"surplus_media: 'images' has 1.*its members jpg.*--media-first"):
        index_tars([url])
    assert main(["index", url, "--layout", "sharegpt", "--media-first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["images"] == NUM
    assert load_manifest(open_store(str(tmp_path))).fields.media_first
    turn = next(iter(StreamLoader(url, processor=None, mode="plain")))["samples"][0].conversation()[0]
    assert [item["type"] for item in turn["content"]] == ["image", "text"]


def test_columns_that_the_user_names(tmp_path: Path) -> None:
    pair = write(tmp_path, lambda i: {"ask": "Q", "reply": "A"}, "image")
    fields = FieldMap(layout="sharegpt", columns={"prompt": "ask", "completion": "reply"})
    with pytest.raises(ConfigError, match="no known layout"):
        index_tars([pair])
    assert index_tars([pair], IndexOptions(fields=fields)).totals.images == NUM


def test_an_unshown_kind_is_named_beside_samples_that_show_all(tmp_path: Path) -> None:
    clip = make_mp4(num_frames=4, height=32, width=32)
    turns = json.dumps({"conversations": llava(0, "<video>\nWhat?")}).encode()
    samples = [("0", {"json": turns, "mp4": clip}), ("1", {"json": turns, "mp4": clip, "jpg": IMAGE})]
    manifest = index_tars([str(write_tar(tmp_path / "x.tar", samples))])
    (bad,) = [BadSample.from_json(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert (bad.sample, bad.reason, manifest.totals.videos) == ("1", "surplus_media", 1)


def test_media_columns_of_later_samples_are_known(tmp_path: Path) -> None:
    first = {"conversations": llava(0, "Why?")}
    second = {"conversations": llava(1), "image": ["b.png"]}
    members = {"a.png": make_jpeg(30, 30), "b.png": make_jpeg(40, 40)}
    samples = [("0", {"json": json.dumps(first).encode()}), ("1", {"json": json.dumps(second).encode(), **members})]
    url = str(write_tar(tmp_path / "x.tar", samples))
    loader = StreamLoader(url, processor=None, mode="plain")
    found = {sample.key: sample.conversation() for batch in loader for sample in batch["samples"]}
    assert found["1"][0]["content"][0] == {"type": "image", "image": make_jpeg(40, 40)}


def test_turns_of_several_forms_are_asked_about(tmp_path: Path) -> None:
    both = {"conversations": llava(0), "question": "Q", "answer": "A"}
    url = str(write_tar(tmp_path / "x.tar", [("0", {"json": json.dumps(both).encode(), "jpg": IMAGE})]))
    with pytest.raises(ConfigError, match=r"fit 2 forms.*prompt=question,completion=answer.*--layout sharegpt"):
        index_tars([url])


def test_media_inside_the_json_are_no_members(tmp_path: Path) -> None:
    make, _, _ = RECORDS["OpenAI audio"]
    with pytest.raises(ConfigError, match=r"missing_member: audio number 1 .* is not in the tar, which has 0"):
        index_tars([write(tmp_path, make, "")])


def test_a_map_without_media_first_has_the_digest_that_it_had() -> None:
    assert set(FieldMap().to_json()) == {"layout", "columns", "tags", "prompt", "caption"}
    assert FieldMap(media_first=True).to_json()["media_first"] is True


def test_captions_among_conversations_are_not_left_out_by_a_guess(tmp_path: Path) -> None:
    talk = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
    captions = [(f"a{i}", {"jpg": IMAGE, "txt": b"a cat"}) for i in range(12)]
    dialogues = [(f"b{i}", {"json": json.dumps(talk).encode()}) for i in range(40)]
    url = str(write_tar(tmp_path / "two.tar", captions + dialogues))
    with pytest.raises(DatasetError, match=r"of the first \d+ samples 12 are media with a text.*tars of their own"):
        index_tars([url])
    assert index_tars([url], IndexOptions(fields=FieldMap(layout="caption", caption="txt"))).totals.images == 12
