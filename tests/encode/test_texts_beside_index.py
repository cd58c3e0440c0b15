"""Tokens of texts in files beside the indexes: of recounted datasets, and of tars made elsewhere."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign_tars import write_captions, write_tar
from vlm_stream import StreamLoader
from vlm_stream.convert import IndexOptions, index_tars, recount, verify_dataset
from vlm_stream.encode import Encoder, KeptText, text_from_bytes, text_to_bytes
from vlm_stream.errors import DatasetError
from vlm_stream.format import ShardIndex, decode_index, load_manifest, read_index
from vlm_stream.storage import Span, SpanReader, open_store
from vlm_stream.testing import build_processor

if TYPE_CHECKING:
    from pathlib import Path

TURNS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a\ud800 é"}]}]
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)
OTHER = "internvl"
"""Trains on what was converted for Qwen2.5-VL."""


@given(ids=IDS, learned=st.lists(st.booleans(), min_size=60, max_size=60), fake=st.none() | IDS)
def test_what_is_written_is_read(ids: list[int], learned: list[bool], fake: list[int] | None) -> None:
    replaced = None if fake is None else (0, len(ids), np.array(fake, dtype=np.int64))
    kept = KeptText(np.array(ids), np.array(learned[: len(ids)]), replaced)
    found = text_from_bytes(text_to_bytes(kept, TURNS), TURNS)
    assert found is not None
    assert found.ids.tolist() == ids
    assert found.is_learned.tolist() == kept.is_learned.tolist()
    assert (found.fake and found.fake[2].tolist()) == fake
    assert text_from_bytes(text_to_bytes(kept, TURNS), [*TURNS, *TURNS]) is None


@given(data=st.binary(max_size=60))
def test_any_bytes_are_text_or_none(data: bytes) -> None:
    of = text_to_bytes(KeptText(np.arange(3), np.ones(3, dtype=bool)), TURNS)
    assert text_from_bytes(data, TURNS) is None
    text_from_bytes(of[:4] + data, TURNS)
    text_from_bytes(of[:16] + zlib.compress(data), TURNS)


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ((0, 0, 0), bytes(2**27)),
        ((4, 0, 0), bytes(2**27)),
        ((2**24 + 1, 0, 0), bytes(2**26 + 4)),
        ((2**32 - 1, 2**32 - 1, 2**32 - 1), bytes(100)),
        ((5, 0, 0), bytes(16)),
        ((3, 0, 1), bytes(16)),
        ((3, 1, 0), bytes(16)),
        ((2, 2, 0), struct.pack("<4I", 1, 1, 0, 9)),
        ((2, 0, 2), struct.pack("<4I", 1, 1, 2, 1)),
    ],
)
def test_what_was_not_written_is_not_read(counts: tuple[int, int, int], numbers: bytes) -> None:
    of = text_to_bytes(KeptText(np.arange(3), np.ones(3, dtype=bool)), TURNS)[:4]
    assert text_from_bytes(of + struct.pack("<3I", 4, 0, 0) + zlib.compress(bytes(16)), TURNS) is not None
    assert text_from_bytes(of + struct.pack("<3I", *counts) + zlib.compress(numbers), TURNS) is None


@pytest.fixture(scope="module")
def other() -> Any:
    sizes = {"size": {"height": 28, "width": 28}}
    return build_processor(OTHER, image=sizes, video=sizes)


@pytest.fixture(scope="module")
def recounted(tmp_path_factory: pytest.TempPathFactory, toy_shards: Path, other: Any) -> Path:
    folder = tmp_path_factory.mktemp("recounted") / "shards"
    shutil.copytree(toy_shards, folder)
    recount(str(folder), other, workers=1)
    return folder


@pytest.fixture(scope="module")
def in_full(toy_shards: Path, other: Any) -> tuple[list[Any], int]:
    """All batches of the dataset before the recount, for the second processor, and how many samples were rendered."""
    with pytest.MonkeyPatch.context() as patch:
        return batches(toy_shards, other, patch)


def batches(dataset: Path, processor: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Any], int]:
    """Return all batches, and how many samples were rendered for them."""
    rendered: list[Any] = []
    whole = Encoder.render

    def render(self: Encoder, turns: Any) -> Any:
        rendered.append(turns)
        return whole(self, turns)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "render", render)
        given = {"mode": "plain", "shuffle": False, "max_frames": 2, **options}
        return list(StreamLoader(str(dataset), processor=processor, **given)), len(rendered)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        assert batch.keys() - {"num_items_in_batch"} == wanted.keys() - {"num_items_in_batch"}
        assert [key for key in wanted if key != "num_items_in_batch" and not same(batch[key], wanted[key])] == []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".json"}


@pytest.mark.parametrize("fake", [False, True])
def test_a_recount_writes_texts_for_a_second_processor(
    recounted: Path, toy_shards: Path, other: Any, processor: Any, monkeypatch: pytest.MonkeyPatch, fake: bool
) -> None:
    assert verify_dataset(str(recounted), workers=1).problems == ()
    assert {path.name: path.read_bytes() for path in toy_shards.glob("*.tar")} == {
        path.name: path.read_bytes() for path in recounted.glob("*.tar")
    }
    expected, num_in_full = batches(toy_shards, other, monkeypatch, fake_image=fake)
    found, num_rendered = batches(recounted, other, monkeypatch, fake_image=fake)
    assert_same(found, expected)
    assert num_rendered < num_in_full / 2
    # Tars keep the tokens of the first, which are used as before.
    expected, num_before = batches(toy_shards, processor, monkeypatch, fake_image=fake)
    found, num_rendered = batches(recounted, processor, monkeypatch, fake_image=fake)
    assert_same(found, expected)
    assert num_rendered == num_before < num_in_full


def test_packed_batches_of_workers_are_the_same(
    recounted: Path, tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(recounted, bare)
    for path in bare.glob("*.tokens.*"):
        path.unlink()
    options = {"mode": "packed", "pack_size": 4096, "num_workers": 1, "bad_budget": 1.0}
    assert_same(batches(recounted, other, monkeypatch, **options)[0], batches(bare, other, monkeypatch, **options)[0])


def test_a_recount_for_the_first_processor_leaves_nothing_behind(
    recounted: Path, toy_shards: Path, tmp_path: Path, processor: Any
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recounted, copy)
    assert len(list(copy.glob("*.tokens.*.bin"))) == len(list(copy.glob("*.tar")))
    recount(str(copy), processor, workers=1)
    assert files(copy) == files(toy_shards)
    again = tmp_path / "again"
    shutil.copytree(recounted, again)
    recount(str(again), build_processor(OTHER), workers=1)
    assert files(again) == files(recounted)


@pytest.mark.parametrize("layout", ["caption", "sharegpt"])
def test_tars_made_elsewhere_get_texts(
    tmp_path: Path, layout: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = tmp_path / "tars"
    if layout == "caption":
        write_captions(tars)
    else:
        turns = [{"from": "human", "value": "Where is <|im_end|>?"}, {"from": "gpt", "value": "Here, café."}]
        texts = ({"conversations": [*turns * (number + 1)]} for number in range(20))
        write_tar(tars / "0.tar", [(f"{n:03}", {"json": json.dumps(each).encode()}) for n, each in enumerate(texts)])
    names = [str(path) for path in sorted(tars.glob("*.tar"))]
    index_tars(names, IndexOptions(out=str(tmp_path / "bare"), workers=1))
    index_tars(names, IndexOptions(out=str(tmp_path / "kept"), workers=1, processor=other))
    options = {"tars": [str(tars)]}
    expected, num_in_full = batches(tmp_path / "bare", other, monkeypatch, store=options)
    found, num_rendered = batches(tmp_path / "kept", other, monkeypatch, store=options)
    assert_same(found, expected)
    assert num_in_full == 20
    assert 3 <= num_rendered <= 6


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10::7] = bytes(byte ^ 255 for byte in data[10::7])
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "forge",
    [
        damage,
        replace_by_folder,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(b"x" + path.read_bytes()),
    ],
    ids=["damaged", "folder", "missing", "cut", "moved"],
)
def test_texts_that_are_not_those_of_the_index_are_said_once(
    recounted: Path,
    in_full: tuple[list[Any], int],
    tmp_path: Path,
    other: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forge: Any,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recounted, copy)
    for path in copy.glob("*.tokens.*.bin"):
        forge(path)
    expected, num_in_full = in_full
    with caplog.at_level("INFO"):
        found, num_rendered = batches(copy, other, monkeypatch)
    assert_same(found, expected)
    assert num_rendered == num_in_full
    assert caplog.text.count("missing, or not those that the index describes") == 1
    if forge is not replace_by_folder:
        assert {problem.kind for problem in verify_dataset(str(copy), workers=1).problems} == {"wrong_tokens"}


def test_texts_of_another_sample_are_not_used(
    recounted: Path,
    in_full: tuple[list[Any], int],
    tmp_path: Path,
    other: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where an index states the places of others, the checksum of the conversation tells."""
    copy = tmp_path / "copy"
    shutil.copytree(recounted, copy)
    place = ShardIndex.text
    monkeypatch.setattr(ShardIndex, "text", lambda self, row: place(self, (row + 1) % len(self)))
    with caplog.at_level("INFO"):
        found, num_rendered = batches(copy, other, monkeypatch)
    expected, num_in_full = in_full
    assert_same(found, expected)
    assert num_rendered == num_in_full
    assert caplog.text.count("not of this sample as it is now") == 1


def test_texts_of_another_release_are_not_asked_for(
    recounted: Path,
    in_full: tuple[list[Any], int],
    other: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import transformers

    expected, num_in_full = in_full
    monkeypatch.setattr(transformers, "__version__", "0.0.1")
    with caplog.at_level("INFO"):
        found, num_rendered = batches(recounted, other, monkeypatch)
    assert_same(found, expected)
    assert num_rendered == num_in_full
    assert caplog.text.count("tokenised beside the indexes") == 1


@pytest.mark.parametrize(("field", "value"), [("size", -1), ("size", 2**40), ("offset", -5), ("offset", 2**60)])
def test_hostile_places_are_refused(recounted: Path, field: str, value: int) -> None:
    import pyarrow as pa

    table = pq.read_table(recounted / "shard-000000.index.parquet")
    places = table.column("texts").to_pylist()
    places[0][field] = value
    column = table.schema.field("texts")
    table = table.set_column(table.schema.get_field_index("texts"), column, pa.array(places, type=column.type))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with pytest.raises(DatasetError, match="in the file of texts"):
        decode_index(bytes(sink.getvalue()))


def test_what_helps_is_read_as_far_as_it_can_be(recounted: Path) -> None:
    store = open_store(str(recounted))
    index = read_index(store, load_manifest(store).shards[0])
    sample = index.span(0)
    (path,) = recounted.glob("shard-000000.tokens.*.bin")
    (recounted / "folder").mkdir(exist_ok=True)

    def help_at(name: str, crc32c: int | None = None) -> Span:
        return Span(str(recounted), name, 0, 8, crc32c, (("", 0, 8),))

    helps = [help_at("none"), help_at("folder"), help_at(path.name, 5), help_at(path.name)]
    with SpanReader() as reader:
        results = reader.begin([sample], 1, helps).results()
        totals = reader.metrics
    assert [getattr(result, "reason", "") for result in results] == [
        "",
        "missing_shard",
        "missing_shard",
        "crc_mismatch",
        "",
    ]
    assert not isinstance(results[-1], Exception)
    assert bytes(results[-1][""]) == path.read_bytes()[:8]
    assert (totals.samples, totals.bad_samples, totals.rereads) == (1, 0, 0)
