"""A shard's files: samples laid into a tar, the rows of its index, and the tokens of texts that the tar does not keep.

Enters: samples with their keys, in order, or what the reader of a tar learned of them. Leaves: the bytes of a tar,
written front to back; a row for each sample, with the place and the checksum of its bytes; the Parquet bytes of all
rows; and the file of tokens beside it, of tars made elsewhere, or recounted, which whoever trains with the same
tokenizer, template and release reads by range. The same samples give the same bytes.

The tar as a whole gets a crc32c too: a sha256 of it would cost as much as reading and writing together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final, NamedTuple

import crc32c
import numpy as np

from vlm_stream.conversation import Conversation
from vlm_stream.convert.clip_tables import NO_TABLE, TableFile, rest_checksums
from vlm_stream.convert.sample import Sample
from vlm_stream.convert.tar import END_OF_TAR, member_header, padding
from vlm_stream.encode import text_to_bytes, unpack_text
from vlm_stream.errors import BadSampleError, NotFoundError
from vlm_stream.format import (
    CLIP_COLUMNS,
    KEYFRAMES,
    MOST_OF_MEDIUM,
    TEXT_COLUMN,
    FieldMap,
    ShardEntry,
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
from vlm_stream.storage import Member, ObjectReader, Store
from vlm_stream.tokens import MediaSizes, pack_steps

NO_TEXT: Final = (0, 0, 0)
"""Offset, size and crc32c of a sample whose tokens are not in the file."""
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
    clips: tuple[int, int, int] = NO_TABLE
    """Offset, size and crc32c of the tables of its clips, in the file of tables."""
    gops: tuple[int, ...] = ()
    """Groups of pictures of each video; 0: not known."""
    texts: tuple[int, int, int] = NO_TEXT
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
    if not any(row.clips != NO_TABLE for row in rows):
        absent.update(CLIP_COLUMNS)
    if not any(row.sizes.videos for row in rows):
        absent.add(KEYFRAMES)
    if not any(row.texts != NO_TEXT for row in rows):
        absent.add(TEXT_COLUMN)
    schema = index_schema(tuple(name for name in names if name not in absent))
    arrays = [pa.array(columns.get(column.name, ()), type=column.type) for column in schema]
    return write_table(pa.table(arrays, schema=schema))


def write_index(
    put: Callable[[str, bytes], object], name: str, rows: Sequence[SampleRow], tables: TableFile, **facts: Any
) -> ShardEntry:
    """Write the index of a shard and its tables of clips, if there are any; return its entry in the manifest.

    `facts` are those of `describe_shard`: size, checksum and etag of the tar.
    """
    if data := tables.to_bytes():
        put(clips_name(name), data)
    index = encode_index(rows)
    put(index_name(name), index)
    return describe_shard(name, index, **facts)


def recounted_index(data: bytes, counts: Sequence[SampleCounts], texts: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """Return an index with other counts and places of texts, and all else as it was."""
    import pyarrow as pa

    table = read_table(data, "index")
    for name in SampleCounts._fields:
        values = pa.array([getattr(sample, name) for sample in counts], type=pa.int32())
        table = table.set_column(table.schema.get_field_index(name), name, values)
    if TEXT_COLUMN in table.column_names:
        table = table.drop_columns([TEXT_COLUMN])
    if any(place != NO_TEXT for place in texts):
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


class ShardWriter:
    """Lays samples into a tar, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file without a buffer of its own, from its beginning."""
        self._file = file
        self._crc = 0
        self.num_bytes = 0
        self.rows: list[SampleRow] = []
        self.tables = TableFile()
        self._files: dict[str, tuple[str, Member]] = {}
        """Path of a file of which a part is shown -> what it is called in the tar, and where it lies."""

    def name_outside(self, url: str, num_bytes: int) -> None:
        """Let samples show a file that is not in the tar."""
        self._files[url] = url, Member(url, -1, num_bytes)

    def add(self, key: str, sample: Sample, counts: SampleCounts) -> None:
        """Append one sample with its members; a file of which other samples show a part as well is stored once."""
        begin = position = self.num_bytes
        pieces: list[bytes] = []
        stored = {name: self._files[path] for name, path in sample.files.items() if path in self._files}
        sample = sample.with_shared({name: place for name, (place, _) in stored.items()})
        places = []
        for name, content in sample.members:
            header = member_header(f"{key}.{name}", len(content))
            places.append(Member(name, position + len(header), len(content)))
            pieces += (header, content, bytes(padding(len(content))))
            position += sum(map(len, pieces[-3:]))
            if name in sample.files:
                self._files[sample.files[name]] = f"{key}.{name}", places[-1]
        clips = NO_TABLE
        if sample.clips is not None:
            is_clip = [
                part and name in sample.clips.clips for name, _ in sample.members for part in (False, True, False)
            ]
            clips = self.tables.add(sample.clips, rest_checksums(zip(pieces, is_clip, strict=True)))
        self.tables.whole.update(sample.whole)
        data = b"".join(pieces)
        self._write(data)
        self.rows.append(
            SampleRow(
                key=key,
                id=sample.id,
                entry=sample.entry,
                offset=begin,
                size=position - begin,
                crc32c=crc32c.crc32c(data),
                **counts._asdict(),
                sizes=sample.sizes,
                members=(*places, *(member._replace(name=name) for name, (_, member) in stored.items())),
                clips=clips,
                gops=() if sample.clips is None else sample.clips.gops,
            )
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
class TextFile:
    """The tokens of a shard's texts, one after the other."""

    fields: FieldMap
    key: str = ""
    """Of the kept text; empty before there is any."""
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def add(
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
            return NO_TEXT
        if self.fields.layout == "native" and not are_tokens_short(texts.get("json", b""), tokens):
            return NO_TEXT
        self.key = tokens["key"]
        data = text_to_bytes(kept, conversation)
        self.parts.append(data)
        self.num_bytes += len(data)
        return self.num_bytes - len(data), len(data), crc32c.crc32c(data)

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
            offset, length, crc = index.text(row) or NO_TEXT
            if offset < reader.position or offset + length > size:
                yield row, f"its tokens are not at byte {offset} of {name}, so its text is tokenised in training."
                continue
            reader.skip_to(offset)
            if crc32c.crc32c(reader.read(length)) != crc:
                yield row, f"its tokens in {name} are damaged, so its text is tokenised in training."
