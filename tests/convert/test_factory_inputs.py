"""Sources that are no files: HF datasets with their media inside become shards too."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import make_shards
from vlm_stream.format import load_manifest, read_index
from vlm_stream.sources import make_cv17_dataset, make_rdr_dataset, make_unimm_chat_dataset
from vlm_stream.storage import open_store
from vlm_stream.testing import make_jpeg, make_wav

if TYPE_CHECKING:
    from pathlib import Path

datasets = pytest.importorskip("datasets", reason="the extra for HF datasets is not installed")


def _images(**columns: list[str]) -> datasets.Dataset:
    count = len(next(iter(columns.values())))
    images = [{"bytes": make_jpeg(20, 30 + number), "path": None} for number in range(count)]
    return datasets.Dataset.from_dict({"image": images, **columns}).cast_column("image", datasets.Image())


def test_images_inside_a_dataset_are_stored_as_they_are(tmp_path: Path) -> None:
    make_shards(make_rdr_dataset(_images(text=["one", "two", "three"])), tmp_path / "out", shuffle=1)
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    for number, word in enumerate(("one", "two", "three")):
        assert contents[f"{number:09d}.0.jpg"] == make_jpeg(20, 30 + number)
        assert json.loads(contents[f"{number:09d}.json"])["conversation"][1]["content"][0]["text"] == word


def test_an_image_shown_twice_is_stored_once_and_counted_twice(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>What? <image>"},
        {"from": "gpt", "value": "That."},
    ]
    make_shards(make_unimm_chat_dataset(_images(conversation=[json.dumps(turns)])), tmp_path / "out")
    store = open_store(str(tmp_path / "out"))
    index = read_index(store, load_manifest(store).shards[0])
    assert [member.name for member in index.members(0)] == ["json", "0.jpg"]
    assert index.media.image_sizes.tolist() == [[20, 30], [20, 30]]


def test_sound_inside_a_dataset(tmp_path: Path) -> None:
    rows = {"audio": [{"bytes": make_wav(0.25), "path": None}], "transcription": ["merhaba"]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    report = make_shards(make_cv17_dataset(dataset), tmp_path / "out")
    assert report.totals.audio_seconds == 0.25
