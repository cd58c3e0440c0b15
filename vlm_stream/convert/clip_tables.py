"""Tables of a sample's clips, written once while its bytes are at hand; and the file of tables beside an index.

Enters: a conversation whose items name members, the members' bytes and the sizes of the media. Leaves: the sample's
tables, if it has a clip that is worth it, and their place in the shard's file of tables.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import crc32c

from vlm_stream.clips import ClipItem, ClipTable, SampleTable, cut_to_items, encode_sample, parse_clip
from vlm_stream.conversation import iter_media, named_frames, named_span
from vlm_stream.errors import BadSampleError
from vlm_stream.media import check_container, find_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vlm_stream.conversation import Conversation, Seconds
    from vlm_stream.convert.media_bytes import MediaReader
    from vlm_stream.tokens import MediaSizes, VideoSize

_LEAST_BYTES: Final = 256 << 10
"""Smaller clips are fetched by one request in less time than a second request takes."""

NO_TABLE: Final = (0, 0, 0)
"""Offset, size and crc32c of the tables of a sample that has none."""


class SampleClips(NamedTuple):
    """The clips of a sample that have tables."""

    items: tuple[ClipItem, ...]
    clips: dict[str, ClipTable]
    gops: tuple[int, ...]
    """Of each video; 0: it has no table; below 0: of the part of a file that it shows."""


@dataclass(slots=True)
class TableFile:
    """The tables of a shard's samples, one after the other."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    whole: Counter[str] = field(default_factory=Counter)
    """Clips without a table, by reason."""

    def add(self, found: SampleClips, rest: tuple[int, ...]) -> tuple[int, int, int]:
        """Append the tables of one sample; return offset, size and crc32c."""
        data = encode_sample(SampleTable(found.items, found.clips, rest))
        self.parts.append(data)
        self.num_bytes += len(data)
        return self.num_bytes - len(data), len(data), crc32c.crc32c(data)

    def to_bytes(self) -> bytes:
        """Return the file; empty where no sample has tables."""
        return b"".join(self.parts)


class _Fit(NamedTuple):
    """What a table can do for a clip."""

    table: ClipTable | str
    """Or why there is none."""
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

    def of(self, content: bytes) -> ClipTable | str:
        """Return the table that is kept of a clip; or why there is none, empty for small ones."""
        return "" if len(content) < _LEAST_BYTES else self.walked(content)

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

    def size_of(self, content: bytes) -> tuple[int, int, int, float] | None:
        """Return frames, height, width and frames per second of a clip as its table has them; None: ask a decoder."""
        table = self.walked(content)
        if isinstance(table, str) or not table.fps:
            return None
        return table.num_frames, *table.sides, table.fps

    def fitting(self, content: bytes, size: VideoSize, seconds: Seconds | None) -> _Fit:
        """Return the table by which a clip, or some seconds of it, can be cut; or why it has none.

        It has the frames and the rate that the index says: then the same frames are picked, however the clip is read.
        """
        table = self.of(content)
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
            crc, length = crc32c.crc32c(piece, crc), length + len(piece)
        elif length:
            found.append(crc)
            crc = length = 0
    return (*found, crc) if length else tuple(found)
