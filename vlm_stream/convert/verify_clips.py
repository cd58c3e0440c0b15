"""Verification of tables of clips: against their index, and against the files that they describe.

Enters: an index with the file of tables beside it; then one sample's bytes at a time. Leaves: what is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from vlm_stream.clips import ClipTable, SampleTable, cut_to_items, decode_sample, spare_ranges
from vlm_stream.conversation import Seconds
from vlm_stream.convert.clip_tables import make_table
from vlm_stream.errors import BadSampleError, NotFoundError
from vlm_stream.media import find_frames
from vlm_stream.storage import crc32c_of, open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import numpy.typing as npt

    from vlm_stream.format import ShardIndex
    from vlm_stream.storage import Span, Store, StoreOptions

_COLUMNS: Final = ("offset", "size", "pts", "shown", "begins")
_FACTS: Final = ("codec", "rate", "is_plain", "start")


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
