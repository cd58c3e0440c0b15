"""The index of a shard: what is written is what is read, from however narrow columns."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from vlm_stream.convert.rows import SampleCounts, SampleRow, encode_index, recounted_index
from vlm_stream.format import decode_index, load_manifest, read_index
from vlm_stream.storage import Member, open_store
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize


@pytest.fixture
def dataset(toy_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_shards, tmp_path / "copy"))


def test_an_index_in_several_row_groups_says_the_same(dataset: Path) -> None:
    """Other writers cut them so, and each has a dictionary of its own."""
    import pyarrow.parquet as pq

    path = dataset / "shard-000000.index.parquet"
    whole = decode_index(path.read_bytes())
    pq.write_table(pq.read_table(path), path, row_group_size=7)
    cut = decode_index(path.read_bytes())
    assert pq.ParquetFile(path).num_row_groups > 1
    assert [cut.span(row) for row in range(len(cut))] == [whole.span(row) for row in range(len(whole))]
    assert (cut.keys, cut.columns.totals(0), cut.entries()) == (whole.keys, whole.columns.totals(0), whole.entries())
    assert [cut.own_id(row) for row in range(len(cut))] == [whole.own_id(row) for row in range(len(whole))]


def test_index_survives_its_bytes(dataset: Path) -> None:
    data = (dataset / "shard-000002.index.parquet").read_bytes()
    index = decode_index(data)
    counts = zip(index.media.text_tokens.tolist(), index.media.label_tokens.tolist(), strict=True)
    assert recounted_index(data, [SampleCounts(*pair) for pair in counts]) == data
    with tarfile.open(dataset / "shard-000002.tar") as tar:
        in_tar = [(member.name, member.offset_data, member.size) for member in tar]
    in_index = [(row, member) for row in range(len(index)) for member in index.members(row)]
    assert [(f"{index.key(row)}.{name}", offset, size) for row, (name, offset, size) in in_index] == in_tar


def test_a_shard_has_no_samples_beyond_its_own(dataset: Path) -> None:
    store = open_store(str(dataset))
    index = read_index(store, load_manifest(store).shards[1])
    for row in (-1, len(index)):
        for look_up in (index.key, index.members, index.span, index.sizes):
            with pytest.raises(IndexError, match=f"shard-000001.tar has {len(index)} samples, and none at {row}"):
                look_up(row)


def test_large_places_and_many_media_survive_narrow_columns() -> None:
    clip = VideoSize(frames=90_000, height=2160, width=3840, fps=29.97, seconds=3003.003, picked=tuple(range(300)))
    sizes = [
        MediaSizes(images=(ImageSize(height=70_000, width=1),) * 300),
        MediaSizes(),
        MediaSizes(videos=(clip,), audios=(AudioSize(samples=2**33, rate=48_000),)),
    ]
    begins = [0, 5 << 30, 9 << 30]
    rows = [
        SampleRow(
            key=f"k\u00e4{number}",
            offset=begin,
            size=4 << 30,
            crc32c=2**32 - 1 - number,
            text_tokens=100_000,
            label_tokens=number - 1,
            sizes=medium,
            members=(Member("json", begin + 512, 2), Member("0.mp4", begin + 2048, 3 << 30)),
        )
        for number, (begin, medium) in enumerate(zip(begins, sizes, strict=True))
    ]
    index = decode_index(encode_index(rows))
    assert index.keys == [row.key for row in rows]
    assert [index.sizes(row) for row in range(3)] == sizes
    assert [index.members(row) for row in range(3)] == [row.members for row in rows]
    assert [index.span(row)[2:5] for row in range(3)] == [(row.offset, row.size, row.crc32c) for row in rows]
    assert index.media.label_tokens.tolist() == [-1, 0, 1]
    totals = index.columns.totals(10)
    assert (totals.images, totals.image_pixels, totals.text_only) == (300, 300 * 70_000, 1)
    assert (totals.text_tokens, totals.label_tokens, totals.video_frames) == (300_000, 1, 90_000)
    assert totals.audio_seconds == round(2**33 / 48_000, 6)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_numbers_beyond_their_column_are_refused(number: int) -> None:
    row = SampleRow(
        key="a", offset=0, size=1, crc32c=0, text_tokens=number, label_tokens=0, sizes=MediaSizes(), members=()
    )
    with pytest.raises((OverflowError, pa.ArrowInvalid)):
        encode_index([row])
