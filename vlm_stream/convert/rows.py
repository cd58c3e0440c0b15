"""A shard's files: samples laid into a tar, the rows of its index, and the files beside that.

Enters: samples with their keys, in order, or the members of a tar that was read. Leaves: the bytes of a tar, written
front to back; a row for each sample, with the place and the checksum of its bytes; the Parquet bytes of all rows; the
tables of clips; and, of tars made elsewhere or recounted, the tokens of texts, which training with the same tokenizer,
template and release reads by range. The same samples give the same bytes.

The tar as a whole gets a crc32c too: a sha256 of it would cost as much as reading and writing together.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

import crc32c
import numpy as np

from vlm_stream.clips import SampleTable, encode_sample
from vlm_stream.conversation import Conversation
from vlm_stream.convert.clip_tables import SampleClips, rest_checksums
from vlm_stream.convert.job import ShardPart
from vlm_stream.convert.sample import Sample
from vlm_stream.convert.tar import END_OF_TAR, Group, TarMember, member_header, padding
from vlm_stream.encode import text_to_bytes, unpack_text
from vlm_stream.errors import BadSampleError, NotFoundError
from vlm_stream.format import (
    CLIP_COLUMNS,
    KEYFRAMES,
    MOST_OF_MEDIUM,
    TEXT_COLUMN,
    FieldMap,
    ShardIndex,
    are_tokens_short,
    clips_name,
    describe_shard,
    index_name,
    index_schema,
    read_table,
    texts_name,
    write_table,
)
from vlm_stream.ledger import BadSample
from vlm_stream.storage import Member, ObjectReader, Store
from vlm_stream.tokens import MediaSizes, pack_steps

NOWHERE: Final = (0, 0, 0)
"""Offset, size and crc32c of what a sample does not have in a file beside the index."""
_LARGEST: Final = 2**31 - 1  # counts and sizes have 32 bits in an index; places in a shard have 64


class SampleCounts(NamedTuple):
    """What a sample's text costs; named as the columns of an index are."""

    text_tokens: int  # all of it, one for every media placeholder
    label_tokens: int = -1  # those that are learned: they have a label, and a token before them. -1: unknown.


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample in its shard."""

    key: str
    id: str | None = None  # the record's own; None: it has none
    entry: str = ""  # name of the meta file's entry, or of the file, that it came from
    offset: int
    size: int
    crc32c: int
    text_tokens: int
    label_tokens: int
    sizes: MediaSizes
    members: tuple[Member, ...]
    clips: tuple[int, int, int] = NOWHERE
    """Offset, size and crc32c of the tables of its clips, in the file of tables."""
    gops: tuple[int, ...] = ()
    """Groups of pictures of each video; 0: not known."""
    texts: tuple[int, int, int] = NOWHERE
    """Offset, size and crc32c of the tokens of its text, in the file of texts."""

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values in the order of the schema's columns and of their structs' fields."""
        sizes = self.sizes
        return (
            self.key,
            self.id or None,
            self.entry,
            self.offset,
            self.size,
            self.crc32c,
            self.text_tokens,
            self.label_tokens,
            [(image.height, image.width) for image in sizes.images],
            [(v.frames, v.height, v.width, v.fps, v.seconds, len(v.picked)) for v in sizes.videos],
            [(audio.samples, audio.rate) for audio in sizes.audios],
            self.members,
            self.clips,
            self.gops or (0,) * len(sizes.videos),
            [pack_steps(video.keyframes) for video in sizes.videos],
            self.texts,
        )


def encode_index(rows: Sequence[SampleRow]) -> bytes:
    import pyarrow as pa

    names = [*index_schema().names, *CLIP_COLUMNS, KEYFRAMES, TEXT_COLUMN]
    columns = dict(zip(names, zip(*map(SampleRow.to_tuple, rows), strict=True), strict=True)) if rows else {}
    absent: set[str] = set()
    if not any(row.clips != NOWHERE for row in rows):
        absent.update(CLIP_COLUMNS)
    if not any(row.sizes.videos for row in rows):
        absent.add(KEYFRAMES)
    if not any(row.texts != NOWHERE for row in rows):
        absent.add(TEXT_COLUMN)
    schema = index_schema(tuple(name for name in names if name not in absent))
    arrays = [pa.array(columns.get(column.name, ()), type=column.type) for column in schema]
    return write_table(pa.table(arrays, schema=schema))


def recounted_index(data: bytes, counts: Sequence[SampleCounts], texts: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """Return an index with other counts and places of texts, and all else as it was."""
    import pyarrow as pa

    table = read_table(data, "index")
    for name in SampleCounts._fields:
        values = pa.array([getattr(sample, name) for sample in counts], type=pa.int32())
        table = table.set_column(table.schema.get_field_index(name), name, values)
    if TEXT_COLUMN in table.column_names:
        table = table.drop_columns([TEXT_COLUMN])
    if any(place != NOWHERE for place in texts):
        (column,) = index_schema((TEXT_COLUMN,))
        table = table.append_column(column, pa.array(texts, type=column.type))
    return write_table(table)


def check_fits_index(text_tokens: int, sizes: MediaSizes) -> None:
    """Raise `BadSampleError` for a sample with a number that an index cannot hold: it would end the whole shard."""
    sides = [side for image in sizes.images for side in (image.height, image.width)]
    sides += [side for video in sizes.videos for side in (video.height, video.width)]
    videos, audios = sizes.videos, sizes.audios
    frames = [number for video in videos for number in (video.frames, len(video.picked))]
    numbers: dict[str, tuple[Sequence[float], float]] = {
        "text tokens": ([text_tokens], _LARGEST),
        "pixels a side": (sides, MOST_OF_MEDIUM["width"]),
        "frames": (frames, MOST_OF_MEDIUM["frames"]),
        "frames a second": ([video.fps for video in videos], MOST_OF_MEDIUM["fps"]),
        "seconds": ([video.seconds for video in videos], MOST_OF_MEDIUM["seconds"]),
        "samples of sound": ([audio.samples for audio in audios], MOST_OF_MEDIUM["samples"]),
        "Hz": ([audio.rate for audio in audios], MOST_OF_MEDIUM["rate"]),
    }
    for what, (values, most) in numbers.items():
        wrong = next((value for value in values if not 0 <= value <= most), None)
        if wrong is not None:
            detail = f"the sample claims {wrong} {what}, which no index holds: it goes from 0 to {most:.0f}."
            raise BadSampleError("convert", "number_too_large", detail)


@dataclass(slots=True)
class SideFile:
    """A file beside an index: what is kept of each sample, one after the other."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, data: bytes) -> tuple[int, int, int]:
        """Append what is kept of one sample; return offset, size and crc32c."""
        self.parts.append(data)
        self.num_bytes += len(data)
        return self.num_bytes - len(data), len(data), crc32c.crc32c(data)


class ShardRows:
    """One shard's index under way: rows, the tables of clips, and for the ledger what was bad."""

    def __init__(self) -> None:
        self.rows: list[SampleRow] = []
        self.bad: list[BadSample] = []
        self.whole: Counter[str] = Counter()
        """Clips without a table, by reason."""
        self._tables = SideFile()

    def add_row(self, group: Group, clips: SampleClips | None, *, shared: Sequence[Member] = (), **values: Any) -> None:
        """Append the row of a sample whose members lie one after the other in the tar.

        Args:
            group: These members, with their names in the sample.
            clips: Which of them have tables.
            shared: Members that it has in common with other samples, and that lie elsewhere.
            values: All else of a `SampleRow`.
        """
        cut = () if clips is None else clips.clips
        pieces = [(piece, part == 1 and name in cut) for name, each in group for part, piece in enumerate(each.pieces)]
        if clips is not None:
            table = SampleTable(clips.items, clips.clips, rest_checksums(pieces))
            values |= {"clips": self._tables.add(encode_sample(table)), "gops": clips.gops}
        crc = 0
        for piece, _ in pieces:
            crc = crc32c.crc32c(piece, crc)
        begin = group[0][1].begin
        members = (*(Member(name, each.offset, len(each.content)) for name, each in group), *shared)
        self.rows.append(SampleRow(offset=begin, size=group[-1][1].end - begin, crc32c=crc, members=members, **values))

    def write(self, put: Callable[[str, bytes], object], number: int, name: str, **facts: Any) -> ShardPart:
        """Write the index, and the tables of clips if there are any; `facts` are those of `describe_shard`."""
        if self._tables.parts:
            put(clips_name(name), b"".join(self._tables.parts))
        index = encode_index(self.rows)
        put(index_name(name), index)
        entry = describe_shard(name, index, **facts)
        return ShardPart(number=number, entry=entry, bad=tuple(self.bad), whole=dict(self.whole))


class ShardWriter(ShardRows):
    """Lays samples into a tar, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file without a buffer of its own, from its beginning."""
        super().__init__()
        self._file = file
        self._crc = 0
        self.num_bytes = 0
        self._files: dict[str, tuple[str, Member]] = {}
        """Path of a file of which a part is shown -> what it is called in the tar, and where it lies."""

    def name_outside(self, url: str, num_bytes: int) -> None:
        """Let samples show a file that is not in the tar."""
        self._files[url] = url, Member(url, -1, num_bytes)

    def add(self, key: str, sample: Sample, counts: SampleCounts) -> None:
        """Append one sample with its members; a file of which other samples show a part as well is stored once."""
        stored = {name: self._files[path] for name, path in sample.files.items() if path in self._files}
        sample = sample.with_shared({name: place for name, (place, _) in stored.items()})
        group: Group = []
        position = self.num_bytes
        for name, content in sample.members:
            path = f"{key}.{name}"
            header = member_header(path, len(content))
            offset, pad = position + len(header), bytes(padding(len(content)))
            member = TarMember(path, position, offset, header, content, pad)
            group.append((name, member))
            position = member.end
            if name in sample.files:
                self._files[sample.files[name]] = path, Member(name, offset, len(content))
        self._write(b"".join(piece for _, member in group for piece in member.pieces))
        self.whole.update(sample.whole)
        self.add_row(
            group,
            sample.clips,
            shared=[member._replace(name=name) for name, (_, member) in stored.items()],
            key=key,
            id=sample.id,
            entry=sample.entry,
            sizes=sample.sizes,
            **counts._asdict(),
        )

    def finish(self) -> int:
        """Write the end of the tar; return the crc32c of the whole."""
        self._write(END_OF_TAR)
        return self._crc

    def _write(self, data: bytes) -> None:
        self._crc = crc32c.crc32c(data, self._crc)
        self.num_bytes += len(data)
        write_all(self._file.fileno(), data)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the bytes; a call may take less than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclass(slots=True)
class TextFile(SideFile):
    """The tokens of a shard's texts."""

    fields: FieldMap = field(kw_only=True)
    key: str = ""
    """Of the kept text; empty before there is any."""

    def keep(
        self, conversation: Conversation, tokens: Mapping[str, Any] | None, own: Any, texts: Mapping[str, bytes]
    ) -> tuple[int, int, int]:
        """Append the tokens of one sample; return offset, size and crc32c.

        Where the JSON of our own shards keeps them or would not, because they take more bytes than the text, they are
        left out: a shard and its index are the same after a conversion and a recount.

        Args:
            conversation: The sample's, as training will read it.
            tokens: What counting has made of it; None: nothing that training can use.
            own: What its JSON keeps.
            texts: Its text members.
        """
        kept = None if tokens is None else unpack_text(tokens, tokens["key"])
        if tokens is None or kept is None or unpack_text(own, tokens["key"]) is not None:
            return NOWHERE
        if self.fields.layout == "native" and not are_tokens_short(texts.get("json", b""), tokens):
            return NOWHERE
        self.key = tokens["key"]
        return self.add(text_to_bytes(kept, conversation))

    def write(self, store: Store, shard: str) -> str:
        """Write the file beside a shard's index, if it has anything; return its name, or nothing."""
        if not self.parts:
            return ""
        name = texts_name(shard, self.key)
        store.put(name, b"".join(self.parts))
        return name


def check_texts(store: Store, index: ShardIndex, name: str) -> Iterator[tuple[int, str]]:
    """Yield the rows whose tokens in a file are not those that the index describes, and what is wrong with them."""
    if index.texts is None:
        return
    rows = np.flatnonzero(index.texts.size)
    rows = rows[np.argsort(index.texts.offset[rows], kind="stable")]
    try:
        size = store.head(name).size
    except NotFoundError:
        yield int(rows[0]), f"there is no {name}, so the texts of this shard are tokenised in training."
        return
    with ObjectReader(store, name, size) as reader:
        for row in rows.tolist():
            offset, length, crc = index.text(row) or NOWHERE
            if offset < reader.position or offset + length > size:
                yield row, f"its tokens are not at byte {offset} of {name}, so its text is tokenised in training."
                continue
            reader.skip_to(offset)
            if crc32c.crc32c(reader.read(length)) != crc:
                yield row, f"its tokens in {name} are damaged, so its text is tokenised in training."
