"""What comes from outside and is read here: each with what is made of it, and what may come of that.

A target is a strategy and a check. A check raises where anything but a value, or an error of ours, comes of the input.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.forge import sealed_manifest, write_parquet
from tests.hostile import good_samples, hostile_samples
from vlm_stream import StreamLoader
from vlm_stream.clips import ClipItem, ClipTable, SampleTable, encode_sample, parse_clip
from vlm_stream.clips.table import pack_numbers
from vlm_stream.convert import make_shards, open_blends
from vlm_stream.convert.energon import read_energon
from vlm_stream.convert.lerobot import is_lerobot, lerobot_videos
from vlm_stream.convert.tar import TarMember, iter_pieces
from vlm_stream.cutting import Cutter
from vlm_stream.errors import BadSampleError, DatasetError, StateError, VlmStreamError
from vlm_stream.format import Drawn, FieldMap, Manifest, TablePlace, decode_index, read_sample
from vlm_stream.media import decode_image, probe_audio, probe_image, probe_video
from vlm_stream.recipe import normalise_sources
from vlm_stream.state import STATE_KEY, RunState, _checksum
from vlm_stream.storage import ReadOptions, Span, open_store, plan_requests
from vlm_stream.testing import make_jpeg, make_mp4, make_palette_png, make_png_with_alpha, make_toy_dataset, make_wav
from vlm_stream.tokens import FrameRule, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "Target"]

_STEPS = 3
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), 1 << 64)
    | st.sampled_from([0, 1, -1, 1 << 20, 1 << 26, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["json", "native", "all", "each", "../x", "\x1b[2J", "\ud800", "AAAA", "a" * 5000])
)
VALUES = st.recursive(LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4))


@dataclass(frozen=True)
class Target:
    """Something that is read."""

    inputs: Callable[[], st.SearchStrategy[Any]]
    check: Callable[[Any], None]


@cache
def folder() -> Path:
    """Return a small dataset, made once for the process."""
    keeper = tempfile.TemporaryDirectory(prefix="vlm-stream-fuzz-")
    _KEPT.append(keeper)
    meta = make_toy_dataset(Path(keeper.name) / "raw", num_samples=20)
    make_shards(meta, Path(keeper.name) / "shards", samples_per_shard=10, workers=1)
    return Path(keeper.name) / "shards"


_KEPT: list[Any] = []  # removed with the process


def new_loader() -> StreamLoader:
    return StreamLoader(str(folder()), processor=None, mode="plain", batch_size=2, window=8, epochs=2)


@cache
def state() -> dict[str, Any]:
    loader = new_loader()
    for _ in itertools.islice(loader, 5):
        pass
    found: dict[str, Any] = json.loads(loader.state_dict()[STATE_KEY])["state"]
    return found


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in places_of(each, (*path, key)))]


def altered(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if not isinstance(value, dict | list):
        return value  # an earlier change has removed the place
    found = dict(value) if isinstance(value, dict) else list(value)
    try:
        found[path[0]] = altered(value[path[0]], path[1:], new)
    except (KeyError, IndexError, TypeError):
        return value
    return found


@st.composite
def changed_json(draw: Any, make: Callable[[], Any]) -> Any:
    """Change some values of a JSON value, and forget or add others."""
    value = make()
    for path in draw(st.lists(st.sampled_from(places_of(value)), min_size=1, max_size=3)):
        value = altered(value, path, draw(VALUES))
    return value


@st.composite
def changed_bytes(draw: Any, makers: tuple[Callable[[], bytes], ...]) -> bytes:
    """Flip, overwrite, cut, repeat or insert some bytes."""
    data = bytearray(draw(st.sampled_from(makers))())
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, min(len(data), 2048)) | st.integers(0, len(data)))
        new = draw(st.binary(max_size=16) | st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f\xff\xff\xff", b"\x80" * 4]))
        size = draw(st.sampled_from([0, len(new), len(new), 1, 512]))
        data[at : at + size] = new
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


def check_state(value: Any) -> None:
    body = json.dumps(value)
    text = f'{{"checksum":"{_checksum(body)}","state":{body}}}'
    loader = new_loader()
    try:
        loader.load_state_dict({STATE_KEY: text})
        plan = RunState.from_dict({STATE_KEY: text}).plan
        planner = loader.stream.plan().planner
        for _ in itertools.islice(planner.steps(loader.options.shape(1), plan), _STEPS):
            pass
    except StateError:
        return


def check_manifest(value: Any) -> None:
    text = value if isinstance(value, bytes) else sealed_manifest(value).encode("utf-8", "surrogatepass")
    try:
        manifest = Manifest.from_json(text)
        assert manifest.totals.samples < 1 << 62
        assert (len(manifest.digest), len(list(manifest.shards))) == (64, len(manifest.shards))
        manifest.to_json().encode("utf-8", "surrogatepass")
        _ = manifest.geometry
    except VlmStreamError:
        return


def index_bytes() -> bytes:
    return (folder() / "shard-000000.index.parquet").read_bytes()


def check_index(data: bytes) -> None:
    try:
        index = decode_index(data)
    except DatasetError:
        return
    for row in range(min(len(index), 20)):
        try:
            plan_requests([index.span(row)], ReadOptions())
            index.key(row), index.own_id(row), index.sizes(row), index.table(row)
        except UnicodeDecodeError:
            raise AssertionError("a text of an index that is none") from None


@st.composite
def changed_rows(draw: Any) -> bytes:
    """Change values of an index; the Parquet around them is whole."""
    table = pq.read_table(io.BytesIO(index_bytes()))
    columns = {}
    for name in draw(st.lists(st.sampled_from(table.column_names), min_size=1, max_size=3)):
        values = table.column(name).to_pylist()
        at = draw(st.integers(0, len(values) - 1))
        columns[name] = [*values[:at], draw(changed_json(lambda value=values[at]: value)), *values[at + 1 :]]
    for name, values in columns.items():
        try:
            column = pa.array(values, table.schema.field(name).type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
        table = table.set_column(table.column_names.index(name), name, column)
    path = folder().parent / "changed.parquet"
    write_parquet(table, path)
    return path.read_bytes()


def tar_bytes() -> bytes:
    return (folder() / "shard-000000.tar").read_bytes()


def check_tar(data: bytes) -> None:
    end = 0
    try:
        for piece in iter_pieces(io.BytesIO(data).read):
            assert piece.begin >= end - 512
            end = piece.end
            if isinstance(piece, TarMember):
                assert data[piece.offset : piece.offset + len(piece.content)] == piece.content
    except DatasetError:
        return


def samples() -> tuple[Callable[[], Any], ...]:
    found = []
    for members in [*good_samples().values(), *hostile_samples().values()]:
        for name, text in members.items():
            if name == "json":
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                found.append(lambda value=value: value)
    return tuple(found)


def check_sample(value: Any) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    for layout in ("native", "sharegpt", "caption"):
        fields = FieldMap(layout=layout, caption="json:text") if layout == "caption" else FieldMap(layout=layout)
        try:
            read_sample(fields, ["json", "0.jpg", "1.jpg", "0.mp4"], {"json": text})
        except BadSampleError:
            continue


def of(value: bytes) -> Callable[[], bytes]:
    return lambda: value


@cache
def pictures_and_sound() -> tuple[Callable[[], bytes], ...]:
    made = (make_jpeg(32, 48), make_palette_png(20, 20), make_png_with_alpha(20, 20), make_wav(0.1))
    return tuple(map(of, made))


@cache
def clip() -> bytes:
    return make_mp4(num_frames=4, height=32, width=32)


def check_media(data: bytes) -> None:
    for use in (probe_image, decode_image, probe_audio):
        try:
            use(data)
        except BadSampleError:
            continue


def check_video(data: bytes) -> None:
    # Not decord: it ends its process on some of these bytes, for which builders are there.
    with contextlib.suppress(BadSampleError):
        probe_video(data, "av")


def energon_notes() -> dict[str, Any]:
    """Return what `energon prepare` writes beside tars, and a blend of that."""
    image = {"sample_type": {"__class__": "CaptioningSample"}, "field_map": {"image": "jpg", "caption": "txt"}}
    leaf = {"weight": 1, "path": ".", "split_part": "train", "subflavors": {"a": 1}}
    return {
        "split": {"split_parts": {"train": ["{0..2}.tar"], "val": ["3.tar"]}, "exclude": ["0.tar/1"]},
        "dataset": image | {"subflavors": {"from": "x"}},
        "blend": {"splits": {"train": {"blend": [leaf, {"weight": 2, "path": "inner.yaml"}]}, "val": {"path": "."}}},
    }


def check_energon(value: Any) -> None:
    place = folder().parent / "energon"
    (place / ".nv-meta").mkdir(parents=True, exist_ok=True)
    (place / ".nv-meta/.info.json").write_text("{}")
    names = {"split": ".nv-meta/split.yaml", "dataset": ".nv-meta/dataset.yaml", "blend": "blend.yaml"}
    for name, path in names.items():
        each = value.get(name) if isinstance(value, dict) else value
        (place / path).write_bytes(each if isinstance(each, bytes) else json.dumps(each).encode())
    with contextlib.suppress(VlmStreamError):
        read_energon(open_store(str(place)), "", {})
    with contextlib.suppress(VlmStreamError):
        open_blends(normalise_sources(str(place / "blend.yaml")), None)


def lerobot_notes() -> dict[str, Any]:
    """Return the description of a LeRobot dataset, and its table of episodes, row by row."""
    place = {"chunk_index": 0, "file_index": 0, "from_timestamp": 0.0, "to_timestamp": 1.5}
    row = {"episode_index": 0, "tasks": ["Pick."]} | {f"videos/top/{name}": value for name, value in place.items()}
    info = {
        "codebase_version": "v3.0",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {"top": {"dtype": "video"}, "action": {"dtype": "float32"}},
    }
    return {"info": info, "rows": [row, row | {"episode_index": 1}]}


def lerobot_table() -> bytes:
    path = folder().parent / "episodes.parquet"
    write_parquet(pa.Table.from_pylist(lerobot_notes()["rows"]), path)
    return path.read_bytes()


def check_lerobot(value: Any) -> None:
    place = folder().parent / "lerobot"
    table = place / "meta/episodes/file.parquet"
    table.parent.mkdir(parents=True, exist_ok=True)
    notes = lerobot_notes() if isinstance(value, bytes) else value
    info = notes.get("info") if isinstance(notes, dict) else notes
    (place / "meta/info.json").write_text(json.dumps(info))
    if isinstance(value, bytes):
        table.write_bytes(value)
    else:
        try:
            write_parquet(pa.Table.from_pylist(notes["rows"]), table)
        except Exception:  # not every value has a place in a table
            table.write_bytes(lerobot_table())
    with contextlib.suppress(VlmStreamError):
        if is_lerobot(open_store(str(place))):
            lerobot_videos(open_store(str(place)), None)


@cache
def long_clip() -> bytes:
    return make_mp4(num_frames=40, gop=5)


@cache
def clip_table() -> ClipTable:
    table = parse_clip(long_clip(), "mov")
    assert isinstance(table, ClipTable)
    return table


def table_bytes() -> bytes:
    return encode_sample(SampleTable((ClipItem("0.mp4", None),), {"0.mp4": clip_table()}, (1, 2)))


@st.composite
def changed_tables(draw: Any) -> bytes:
    """Change numbers of a table of a clip, what it says of the codec, and what is said of the sample."""
    table = clip_table()
    codec = {
        **table.codec._asdict(),
        "is_plain": True,
        "rate": table.rate,
        "start": 0,
        "extradata": table.codec.extradata.hex(),
    }
    columns = [
        table.offset,
        table.size,
        np.diff(table.pts, prepend=0),
        ~table.shown,
        np.diff(table.begins),
        table.crc32c,
    ]
    lists = [list(map(int, column)) for column in columns]
    for number in draw(st.lists(st.integers(0, 5), max_size=2)):
        numbers = lists[number]
        at = draw(st.integers(0, len(numbers)))
        numbers[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=2))
    told = draw(changed_json(lambda: json.loads(json.dumps(codec)))) if draw(st.booleans()) else codec
    body = zlib.compress(json.dumps(told).encode() + b"\n" + zlib.decompress(pack_numbers(*lists)))
    head = {"items": [["0.mp4", None]], "clips": [["0.mp4", len(body)]], "rest": [1, 2]}
    said = draw(changed_json(lambda: head)) if draw(st.booleans()) else head
    return json.dumps(said).encode() + b"\n" + body


def check_tables(data: bytes) -> None:
    size = len(long_clip())
    span = Span("memory://x", "a.tar", 0, size + 2048, 1, (("json", 512, 100), ("0.mp4", 1536, size)))
    table = clip_table()
    height, width = table.sides
    video = VideoSize(frames=table.num_frames, height=height, width=width, fps=table.fps, seconds=4.0)
    drawn = Drawn(
        "k", span, MediaSizes(videos=(video,)), "e", None, TablePlace("c", 0, len(data), 1, (table.num_gops,))
    )
    cutter = Cutter(FrameRule(fps=None, max_frames=2), ReadOptions(max_gap_bytes=0), ["said"])
    found = cutter.cut(drawn, data)
    for part in () if found is None else found[0]:
        assert 0 <= part.offset <= part.offset + part.size <= span.size


TARGETS = {
    "state": Target(lambda: changed_json(state), check_state),
    "manifest": Target(
        lambda: (
            changed_json(lambda: json.loads((folder() / "dataset.json").read_text()))
            | changed_bytes((lambda: (folder() / "dataset.json").read_bytes(),))
        ),
        check_manifest,
    ),
    "index": Target(lambda: changed_rows() | changed_bytes((index_bytes,)), check_index),
    "tar": Target(lambda: changed_bytes((tar_bytes,)), check_tar),
    "clip tables": Target(lambda: changed_tables() | changed_bytes((table_bytes,)), check_tables),
    "sample JSON": Target(
        lambda: st.sampled_from(samples()).flatmap(changed_json) | VALUES | st.binary(max_size=200), check_sample
    ),
    "media headers": Target(lambda: changed_bytes(pictures_and_sound()) | st.binary(max_size=64), check_media),
    "Energon notes": Target(
        lambda: changed_json(energon_notes) | changed_bytes((lambda: json.dumps(energon_notes()["split"]).encode(),)),
        check_energon,
    ),
    "LeRobot notes": Target(lambda: changed_json(lerobot_notes) | changed_bytes((lerobot_table,)), check_lerobot),
    "video headers": Target(lambda: changed_bytes((clip,)), check_video),
}
