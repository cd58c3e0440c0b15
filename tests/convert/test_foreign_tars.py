"""Tars made elsewhere become datasets without being rewritten."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from typing import TYPE_CHECKING

import pytest

from vlm_stream.convert import IndexOptions, index_tars, verify_dataset
from vlm_stream.errors import ConfigError
from vlm_stream.format import FieldMap, load_manifest, read_index, to_conversation
from vlm_stream.ledger import BadSample
from vlm_stream.storage import SpanReader, StoreOptions, crc32c_of, open_store
from vlm_stream.testing import make_jpeg, make_mp4

if TYPE_CHECKING:
    from pathlib import Path


_PAIR = (("jpg", make_jpeg(20, 30)), ("txt", b"x"))


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1234567.5 if form == tarfile.PAX_FORMAT else 1234567
            tar.addfile(info, io.BytesIO(data))
    return path


def conversations(dataset: Path) -> dict[str, list[dict]]:
    """Read every sample the way training does: spans, then fields."""
    store = open_store(str(dataset))
    manifest = load_manifest(store)
    found = {}
    for shard in manifest.shards:
        index = read_index(store, shard, tars=manifest.tars)
        with SpanReader() as reader:
            for row, members in enumerate(reader.begin([index.span(row) for row in range(len(index))]).results()):
                assert not isinstance(members, Exception), members
                texts = {name: bytes(data) for name, data in members.items()}
                found[index.key(row)] = to_conversation(manifest.fields, list(members), texts)
    return found


def caption(text: str, image: str = "jpg", prompt: str = "Describe this image.") -> list[dict]:
    return [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": prompt}]},
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
    ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_img2dataset_layout_in_every_tar_format(tmp_path: Path, form: int) -> None:
    for number in range(2):
        members = []
        for sample in range(3):
            key = f"{number:05d}{sample:04d}"
            meta = json.dumps({"url": "http://x/y.jpg", "caption": f"cap {key}", "width": 30, "height": 20})
            members += [
                (f"{key}.jpg", make_jpeg(20, 30 + sample)),
                (f"{key}.json", meta.encode()),
                (f"{key}.txt", f"cap {key}".encode()),
            ]
        write_tar(tmp_path / f"{number:05d}.tar", members, form)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.tar")}
    manifest = index_tars([str(tmp_path / "{00000..00001}.tar")])
    assert (manifest.fields.layout, manifest.fields.caption) == ("caption", "txt")
    assert {path: path.read_bytes() for path in tmp_path.glob("*.tar")} == before
    assert verify_dataset(str(tmp_path)).problems == ()
    found = conversations(tmp_path)
    assert len(found) == 6
    assert found["000010002"] == caption("cap 000010002")
    store = open_store(str(tmp_path))
    assert read_index(store, manifest.shards[0]).media.image_sizes.tolist() == [[20, 30], [20, 31], [20, 32]]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_inside_the_tar(tmp_path: Path, form: int) -> None:
    folder = "a/" + "long" * 60
    members = []
    for number in range(3):
        members += [(f"{folder}/{number}.jpg", make_jpeg(20, 30)), (f"{folder}/{number}.txt", b"words")]
    write_tar(tmp_path / "x.tar", members, form)
    manifest = index_tars([str(tmp_path / "x.tar")])
    index = read_index(open_store(str(tmp_path)), manifest.shards[0])
    assert index.keys == [f"{folder}/{number}" for number in range(3)]
    assert index.offset[0] == 0  # the long name's own header belongs to the sample
    assert verify_dataset(str(tmp_path)).problems == ()
    assert conversations(tmp_path)[f"{folder}/2"] == caption("words")


def test_sharegpt_inside_json_with_media_by_number_or_by_name(tmp_path: Path) -> None:
    by_number = {
        "conversations": [
            {"from": "human", "value": "<image><image>Compare."},
            {"from": "gpt", "value": "Same."},
        ],
        "images": ["coco/1.jpg", "coco/2.jpg"],
    }
    by_name = {
        "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "!"}],
        "images": ["b.png"],
    }
    write_tar(
        tmp_path / "s.tar",
        [
            ("1.json", json.dumps(by_number).encode()),
            ("1.first.jpg", make_jpeg(20, 30)),
            ("1.second.jpg", make_jpeg(40, 50)),
            ("2.json", json.dumps(by_name).encode()),
            ("2.a.png", make_jpeg(20, 30)),
            ("2.b.png", make_jpeg(60, 70)),
        ],
    )
    manifest = index_tars([str(tmp_path / "s.tar")])
    assert manifest.fields.columns == {"messages": "conversations"}
    assert manifest.fields.tags["user_tag"] == "human"
    index = read_index(open_store(str(tmp_path)), manifest.shards[0])
    assert index.media.image_sizes.tolist() == [[20, 30], [40, 50], [60, 70]]
    found = conversations(tmp_path)
    assert [item.get("image") for item in found["1"][0]["content"]] == ["first.jpg", "second.jpg", None]
    assert found["2"][0]["content"][0] == {"type": "image", "image": "b.png"}


def test_json_beside_one_image(tmp_path: Path) -> None:
    data = {
        "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}],
        "images": ["x.jpg"],
    }
    write_tar(tmp_path / "s.tar", [("1.jpg", make_jpeg(20, 30)), ("1.json", json.dumps(data).encode())])
    index_tars([str(tmp_path)])
    assert conversations(tmp_path)["1"][0]["content"][0] == {"type": "image", "image": "jpg"}


def test_caption_in_json_and_videos(tmp_path: Path) -> None:
    clip = make_mp4(num_frames=6, height=48, width=64, fps=4.0)
    write_tar(tmp_path / "v.tar", [("1.mp4", clip), ("1.json", json.dumps({"caption": " a clip "}).encode())])
    manifest = index_tars([str(tmp_path / "v.tar")])
    assert manifest.fields.caption == "json:caption"
    assert manifest.totals.video_frames == 6
    assert conversations(tmp_path)["1"][1]["content"][0]["text"] == "a clip"


def test_our_own_shards_are_indexed_as_they_were(toy_shards: Path, tmp_path: Path) -> None:
    for path in toy_shards.glob("*.tar"):
        shutil.copy(path, tmp_path)
    manifest = index_tars([str(tmp_path / "shard-*.tar")])
    assert manifest.digest == load_manifest(open_store(str(toy_shards))).digest


def test_indexes_elsewhere_leave_the_tars_folder_alone(tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    for part in ("a", "b"):
        write_tar(tars / part / "0.tar", [(f"{part}.jpg", make_jpeg(20, 30)), (f"{part}.txt", part.encode())])
    manifest = index_tars([str(tars / "{a,b}" / "0.tar")], IndexOptions(out=str(tmp_path / "out"), workers=2))
    assert [shard.name for shard in manifest.shards] == ["a/0.tar", "b/0.tar"]
    assert sorted(path.name for path in tars.rglob("*") if path.is_file()) == ["0.tar", "0.tar"]
    assert (tmp_path / "out" / "b" / "0.index.parquet").exists()
    assert verify_dataset(str(tmp_path / "out"), store=StoreOptions(tars=(str(tars),))).problems == ()
    assert set(conversations(tmp_path / "out")) == {"a", "b"}


def test_bad_samples_of_foreign_tars_are_left_out_and_named(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "x.tar",
        [
            ("README", b"no sample"),
            ("1.jpg", make_jpeg(20, 30)),
            ("1.txt", b"fine"),
            ("2.jpg", b"no image"),
            ("2.txt", b"bad"),
            ("3.txt", b"no image at all"),
            ("4.jpg", make_jpeg(20, 30)),
            ("1.jpg", make_jpeg(20, 30)),
            ("1.txt", b"again"),
            ("5.jpg", make_jpeg(20, 30)),
            ("5.jpg", make_jpeg(20, 30)),
            ("6.jpg", make_jpeg(20, 30)),
            ("6.txt", b"fine"),
        ],
    )
    manifest = index_tars([str(path)])
    bad = [BadSample.from_json(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(found.sample, found.reason) for found in bad] == [
        ("2", "bad_image"),
        ("3", "no_media"),
        ("4", "no_caption"),
        ("1", "duplicate_key"),
        ("5", "duplicate_member"),
    ]
    assert all(found.shard == "x.tar" and found.offset >= 0 for found in bad)
    assert set(conversations(tmp_path)) == {"1", "6"}
    assert sum(manifest.dropped.values()) == 5
    assert verify_dataset(str(tmp_path)).problems == ()


@pytest.mark.parametrize(
    ("name", "byte", "kept"),
    [
        ("3.jpg", 150, "0124"),  # in the checksum: the name says whose member is lost
        ("3.jpg", 0, "0124"),  # in the name: what is left of 3 lacks an image
        ("3.txt", 150, "0124"),
        ("3.txt", 0, "0124"),
        ("4.txt", 150, "0123"),  # nothing follows
        ("0.jpg", 150, "1234"),
    ],
)
def test_a_damaged_header_costs_its_own_sample_and_no_other(tmp_path: Path, name: str, byte: int, kept: str) -> None:
    members = [(f"{n}.{kind}", data) for n in range(5) for kind, data in (("jpg", make_jpeg(20, 30)), ("txt", b"x"))]
    path = write_tar(tmp_path / "x.tar", members, tarfile.USTAR_FORMAT)
    with tarfile.open(path) as tar:
        offset = tar.getmember(name).offset
    data = bytearray(path.read_bytes())
    data[offset + byte] ^= 0x40
    path.write_bytes(bytes(data))
    manifest = index_tars([str(path)])
    assert "".join(conversations(tmp_path)) == kept
    bad = [BadSample.from_json(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert {found.reason for found in bad} <= {"damaged_tar", "no_media"}
    assert any(f"header at byte {offset} is damaged" in found.detail for found in bad)
    assert name[0] in {found.sample for found in bad}
    assert manifest.shards[0].crc32c == crc32c_of(path.read_bytes())
    assert verify_dataset(str(tmp_path)).problems == ()


def test_tars_joined_by_cat_are_indexed_whole(tmp_path: Path) -> None:
    parts = [write_tar(tmp_path / f"{p}.part", [(f"{p}{n}.{k}", d) for n in range(3) for k, d in _PAIR]) for p in "ab"]
    (tmp_path / "joined.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    manifest = index_tars([str(tmp_path / "joined.tar")])
    assert list(conversations(tmp_path)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert manifest.dropped == {}
    assert verify_dataset(str(tmp_path)).problems == ()


def test_a_packed_file_named_tar_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(gzip.compress(write_tar(tmp_path / "x", [("1.jpg", b"x")]).read_bytes()))
    with pytest.raises(ConfigError, match=r"x.tar: the file is no tar but packed by gzip; unpack it first"):
        index_tars([str(tmp_path / "x.tar")])


def test_what_cannot_be_indexed_is_refused_with_a_sentence(tmp_path: Path) -> None:
    image = make_jpeg(20, 30)
    unknown = write_tar(tmp_path / "u" / "u.tar", [("1.jpg", image), ("1.json", b'{"width": 3}')])
    empty = write_tar(tmp_path / "e" / "e.tar", [])
    good = write_tar(tmp_path / "g" / "g.tar", [("1.jpg", image), ("1.txt", b"x")])
    cases = [
        ([str(unknown)], "the first sample has the members jpg, json with the fields width: no known layout"),
        ([str(empty)], "hold no samples"),
        ([], "no tar was named"),
        ([str(tmp_path / "nothing")], "holds no .tar file"),
        ([str(tmp_path / "*.tar")], "holds no .tar file"),
        ([str(good), str(good)], "is named twice"),
        ([str(tmp_path / "x.tar.gz")], "compressed tars cannot be read at an offset"),
        (["s3://a/1.tar", "s3://b/1.tar"], "the tars lie in several stores"),
        ([str(tmp_path / "{1..")], "has a brace without its pair"),
    ]
    for urls, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            index_tars(urls)
    index_tars([str(good)])
    with pytest.raises(ConfigError, match=r"already holds a dataset \(1 samples\); nothing was written"):
        index_tars([str(good)])
    index_tars([str(good)], IndexOptions(overwrite=True, fields=FieldMap(layout="caption", prompt="What?")))
    assert conversations(good.parent)["1"] == caption("x", prompt="What?")
    with pytest.raises(ConfigError, match="'captions' is no layout of samples; did you mean 'caption'"):
        FieldMap(layout="captions")
