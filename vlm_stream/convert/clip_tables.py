"""Tables of a sample's clips, made once while its bytes are at hand; and their checks.

Enters: a conversation whose items name members, the members' bytes and the sizes of the media. Leaves: the sample's
tables, if it has a clip that is worth it. For verification: an index with its file of tables, and one sample's bytes at
a time; then what is wrong.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vlm_stream.clips import (
    ClipItem,
    ClipTable,
    SampleTable,
    cut_to_items,
    decode_sample,
    parse_clip,
    spare_ranges,
)
from vlm_stream.conversation import Conversation, Seconds, iter_media, named_frames, named_span
from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.errors import BadSampleError, NotFoundError
from vlm_stream.format import ShardIndex
from vlm_stream.media import check_container, find_frames
from vlm_stream.storage import Span, Store, StoreOptions, crc32c_of, open_store
from vlm_stream.tokens import MediaSizes, VideoSize

_LEAST_BYTES: Final = 256 << 10
"""Smaller clips are fetched by one request in less time than a second request takes."""

_COLUMNS: Final = ("offset", "size", "pts", "shown", "begins")
_FACTS: Final = ("codec", "rate", "is_plain", "start")


class SampleClips(NamedTuple):
    """The clips of a sample that have tables."""

    items: tuple[ClipItem, ...]
    clips: dict[str, ClipTable]
    gops: tuple[int, ...]
    """Of each video; 0: it has no table; below 0: of the part of a file that it shows."""


class _Fit(NamedTuple):
    """What a table can do for a clip."""

    table: ClipTable | str
    """Or why there is none; empty for small clips."""
    first: int
    """Of the frames that are shown."""
    frames: int


def make_table(content: bytes) -> ClipTable | str:
    """Return the table of a clip, or why there is none."""
    try:
        container = check_container(content, "convert")
    except BadSampleError as error:
        return str(error)
    return parse_clip(content, container)


class ClipTables:
    """The tables of one sample's clips, each made once, while the sample is."""

    def __init__(self, reader: MediaReader | None = None) -> None:
        """Start without any but that of the file that the reader keeps."""
        self._reader = reader
        self._found: dict[int, ClipTable | str] = {}
        self.whole: dict[str, str] = {}
        """Why a member is read whole; small ones are not named."""

    def walked(self, content: bytes) -> ClipTable | str:
        """Return the table of a clip of any size, whose bytes outlive this object; or why there is none."""
        if id(content) not in self._found:
            kept = None if self._reader is None else self._reader.kept
            if kept is not None and kept.content is content:
                table = kept.table = kept.table or make_table(content)
            else:
                table = make_table(content)
            self._found[id(content)] = table
        return self._found[id(content)]

    def fitting(self, content: bytes, size: VideoSize, seconds: Seconds | None) -> _Fit:
        """Return the table by which a clip, or some seconds of it, can be cut; or why it has none.

        It has the frames and the rate that the index says: then the same frames are picked, however the clip is read.
        """
        table = "" if len(content) < _LEAST_BYTES else self.walked(content)
        if isinstance(table, str):
            return _Fit(table, 0, 0)
        if table.num_gops == 1:
            return _Fit("it is one group of pictures", 0, 0)
        first, frames = (0, table.num_frames) if seconds is None else find_frames(table.times, size.fps, seconds)
        told = (size.frames, size.height, size.width, size.fps)
        if not table.fps or (frames, *table.sides, table.fps) != told:
            return _Fit("another library sees other frames or another rate", 0, 0)
        return _Fit(table, first, frames)


def find_clips(
    conversation: Conversation, contents: Mapping[str, bytes], sizes: MediaSizes, tables: ClipTables
) -> SampleClips | None:
    """Return the tables of a sample's clips; None where no clip has one.

    A clip has one if it is large enough, if other media do not share its file, and if it fits the index.
    """
    if not sizes.videos:
        return None
    items, clips, gops = [], {}, []
    media = list(iter_media(conversation))
    others = {str(item[item["type"]]) for item in media if item["type"] != "video"}
    videos = [item for item in media if item["type"] == "video"]
    for item, size in zip(videos, sizes.videos, strict=True):
        name = item["video"] if isinstance(item["video"], str) else ""
        seconds = named_span(item)
        fit = _Fit("other media share its file", 0, 0)
        if name not in others:
            fit = tables.fitting(contents.get(name, b""), size, seconds)
        named = named_frames(item)
        found = ClipItem(None, None if named is None else tuple(named))
        count = 0
        if isinstance(fit.table, ClipTable):
            clips[name] = fit.table
            span = None if seconds is None else (*seconds, fit.first, fit.frames)
            found = found._replace(member=name, span=span)
            count = fit.table.num_gops if span is None else -fit.table.gops_of(fit.first, fit.frames)
        elif fit.table and name not in clips:
            tables.whole[name] = fit.table
        items.append(found)
        gops.append(count)
    return SampleClips(*cut_to_items(items, clips), tuple(gops)) if clips else None


def rest_checksums(pieces: Iterable[tuple[bytes, bool]]) -> tuple[int, ...]:
    """Return the crc32c of each run of bytes outside of clips; pieces say whether they are a clip."""
    found = []
    crc = length = 0
    for piece, is_clip in pieces:
        if not is_clip:
            crc, length = crc32c(piece, crc), length + len(piece)
        elif length:
            found.append(crc)
            crc = length = 0
    return (*found, crc) if length else tuple(found)


# --- verification ---


def read_tables(store: Store, index: ShardIndex, name: str) -> tuple[bytes, str]:
    """Return the file of tables of a shard, and what is wrong with it as a whole; empty: nothing."""
    if index.clips is None:
        return b"", ""
    num_bytes = int(np.max(index.clips.offset.astype(np.int64) + index.clips.size, initial=0))
    try:
        data = bytes(store.get(name))
    except NotFoundError:
        return b"", f"there is no {name}, so the clips of this shard are read whole."
    if len(data) != num_bytes:
        return data, f"{name} has {len(data)} bytes, its index says {num_bytes}."
    return data, ""


def check_table(
    index: ShardIndex,
    row: int,
    tables: bytes,
    data: bytes,
    checked: dict[int | str, bytes] | None = None,
    options: StoreOptions | None = None,
) -> Iterator[str]:
    """Yield what is wrong with the tables of one sample, whose bytes are `data`.

    Tables of whole files are put into `checked`, by their places: samples that share these have parts of the same.
    """
    checked = {} if checked is None else checked
    outside = {span.members[0][0]: span for span in index.shared(row) if span.crc32c is None}
    place = index.table(row)
    if place is None or not tables:
        return
    content = tables[place.offset : place.offset + place.size]
    if crc32c_of(content) != place.crc32c:
        yield "the tables of its clips are damaged, so they are read whole."
        return
    try:
        table = decode_sample(content)
    except ValueError as error:
        yield f"the tables of its clips cannot be read ({error})."
        return
    view, span = memoryview(data), index.span(row)
    members = {name: (offset - span.offset, size) for name, offset, size in index.members(row)}
    if not table.clips.keys() <= members.keys():
        yield "its tables are of clips that it does not have."
        return
    own = [(offset - span.offset, size) for name, offset, size in span.members if name in table.clips]
    rest = spare_ranges(0, len(data), own)
    if tuple(crc32c_of(view[begin : begin + size]) for begin, size in rest) != table.rest:
        yield "the checksums of what lies around its clips are not those of the tar."
    videos = index.sizes(row).videos
    gops = tuple(map(table.num_gops, table.items))
    if len(table.items) != len(videos) or gops != place.gops:
        yield "its tables are not of the videos that the index has."
    for name, clip in table.clips.items():
        begin, size = members[name]
        at = name if name in outside else span.offset + begin
        if name in outside and at not in checked:
            content = _read_file(outside[name], options)
        elif (begin, size) in own:
            content = bytes(view[begin : begin + size])
        elif at in checked:
            yield from _compare(name, table, ClipTable.from_bytes(checked[at]))
            continue
        else:
            yield f"the sample that holds the file of {name} has no table of it that is right."
            continue
        found = yield from _check_clip(name, clip, content)
        if found is not None:
            checked[at] = found.to_bytes()
            yield from _compare(name, table, found)


def _read_file(span: Span, options: StoreOptions | None) -> bytes:
    """Return a file outside of the shard; empty where it is not there."""
    try:
        return bytes(open_store(span.root, options).get(span.path))
    except NotFoundError:
        return b""


def _check_clip(name: str, clip: ClipTable, content: bytes) -> Generator[str, None, ClipTable | None]:
    """Yield what is wrong with the bytes of a clip; return the table of the whole file, if nothing is."""
    ranges = (clip.gop_range(gop) for gop in range(clip.num_gops))
    crc32c = np.array([crc32c_of(memoryview(content)[begin : begin + size]) for begin, size in ranges])
    if not np.array_equal(crc32c, clip.crc32c):
        yield _say_damage(name, clip, crc32c)
        return None
    found = make_table(content)
    if isinstance(found, str):
        yield f"{name} has a table, and none can be made of it: {found}."
        return None
    return found


def _compare(name: str, told: SampleTable, whole: ClipTable) -> Iterator[str]:
    """Yield what differs in the table of a clip from that of its file, as far as the sample's videos need it."""
    items = [item for item in told.items if item.member == name]
    try:
        parts = [item.span and find_frames(whole.times, whole.fps, Seconds(*item.span[:2])) for item in items]
        placed = [
            item._replace(span=part and item.span and (*item.span[:2], *part))
            for item, part in zip(items, parts, strict=True)
        ]
        expected, clips = cut_to_items(placed, {name: whole})
    except BadSampleError as error:
        yield f"a part of {name} is not in the file: {error}"
        return
    found, clip = clips[name], told.clips[name]
    strange = [column for column in _COLUMNS if not np.array_equal(getattr(found, column), getattr(clip, column))]
    strange += [fact for fact in _FACTS if getattr(found, fact) != getattr(clip, fact)]
    if strange:
        yield f"the table of {name} is not that of the file: it has another {' and '.join(strange)}."
    elif not np.array_equal(found.crc32c, clip.crc32c):
        yield _say_damage(name, clip, found.crc32c)
    elif list(expected) != items:
        yield f"the parts of {name} are not at the frames that its table says."


def _say_damage(name: str, clip: ClipTable, crc32c: npt.NDArray[np.int64]) -> str:
    seconds = clip.seconds(int(clip.begins[np.argmax(crc32c != clip.crc32c)]))
    return f"the pictures of {name} from {seconds:.2f} s on are not those of its table."
