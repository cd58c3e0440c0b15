"""One record becomes one sample: its members, and the sizes of its media.

Enters: a record and a reader of media. Leaves: `(name, bytes)` members, JSON first, and what the index needs to know;
or `BadSampleError`. Media bytes are never changed and never decoded: only their headers are looked at. Tars and
offsets are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_stream.clips import ClipTable
from vlm_stream.conversation import (
    MEDIA_TYPES,
    SPAN_KEYS,
    Conversation,
    Item,
    check_conversation,
    frame_rate,
    iter_media,
    map_media,
    named_frames,
    named_span,
)
from vlm_stream.convert.clip_tables import ClipTables, SampleClips, find_clips
from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.errors import BadSampleError, blame_sample, shorten
from vlm_stream.format import MEDIA_EXTENSIONS, are_tokens_short, keep_tokens
from vlm_stream.keys import EXIF_ROTATE
from vlm_stream.media import (
    DEFAULT_LIMITS,
    MediaLimits,
    VideoInfo,
    cut_info,
    is_turned,
    probe_audio,
    probe_image,
    probe_video,
)
from vlm_stream.sources import Record
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize

_MAGIC = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF8", "gif"),
    (8, b"WEBP", "webp"),
    (8, b"WAVE", "wav"),
    (8, b"AVI ", "avi"),
    (0, b"BM", "bmp"),
    (0, b"II*\0", "tif"),
    (0, b"MM\0*", "tif"),
    (0, b"\x1a\x45\xdf\xa3", "mkv"),
    (4, b"ftyp", "mp4"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
)
_ISO_MEDIA = {"image": "avif", "video": "mp4", "audio": "m4a"}
"""What one and the same container is called, by what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sample, ready to be laid into a tar."""

    members: tuple[tuple[str, bytes], ...]  # name without the key, and content; `json` first
    conversation: Conversation  # as in the JSON member
    sizes: MediaSizes  # one for each item of the conversation, also where two items share a member
    id: str | None = None  # the record's own; None: it has none
    entry: str = ""  # name of the meta file's entry, or of the file, that it came from
    clips: SampleClips | None = None  # tables of its clips; None: it has none
    whole: tuple[str, ...] = ()  # why clips have no table
    files: dict[str, str] = field(default_factory=dict)  # members of which it shows a part -> path: others may, too

    def with_shared(self, names: dict[str, str]) -> Sample:
        """Return the sample without some members; its JSON names the members of other samples that are the same."""
        if not names:
            return self
        (name, data), *media = self.members
        data = data[:-1] + b',"shared":' + _to_json(names) + b"}"
        return replace(self, members=((name, data), *(member for member in media if member[0] not in names)))

    def with_tokens(self, tokens: dict[str, Any] | None) -> Sample:
        """Return the sample whose JSON keeps the tokens of its text, unless they take more bytes than the text."""
        (name, data), *media = self.members
        if tokens is None or not are_tokens_short(data, tokens):
            return self
        return replace(self, members=((name, keep_tokens(data, tokens)), *media))


def build_sample(record: Record, reader: MediaReader, *, exif_rotate: bool = False) -> Sample:
    """Read the record's media and give them member names.

    With `exif_rotate` items whose images are to be turned say so, and sizes are those of the turned images.
    """
    check_conversation(record.conversation)
    media = _Members(record, reader)
    limits = reader.rules.limits
    conversation = map_media(record.conversation, dict)
    sizes: dict[str, list[Any]] = {medium: [] for medium in MEDIA_TYPES}
    tables = ClipTables(reader)
    files: dict[str, str] = {}
    for item in iter_media(conversation):
        medium = item["type"]
        where = item.get(medium)
        frames = where if isinstance(where, (list, tuple)) else [where]
        if frames is where and (medium != "video" or not frames):
            raise BadSampleError("convert", "media_not_a_path", f"one {medium} item names {len(where)} media.")
        is_part = isinstance(where, str) and medium != "image" and any(item.get(key) is not None for key in SPAN_KEYS)
        named = [media.add("image" if frames is where else medium, frame, is_part=is_part) for frame in frames]
        item[medium] = [name for name, _ in named] if frames is where else named[0][0]
        if is_part and isinstance(where, str):
            files[named[0][0]] = where
        try:
            contents = [data for _, data in named]
            if exif_rotate and medium != "audio" and any(is_turned(data, limits) for data in contents):
                item[EXIF_ROTATE] = True
            sizes[medium].append(measure_item(item, contents, tables, limits))
        except BadSampleError as error:
            shown = next((place for place in frames if isinstance(place, str)), f"a {medium} given as bytes")
            raise BadSampleError(error.stage, error.reason, f"{shorten(shown, 300)}: {error}") from error
    text: dict[str, Any] = {"conversation": conversation, "id": record.own_id, "source": record.source}
    if record.extras:
        text["extras"] = record.extras
    measured = MediaSizes(images=tuple(sizes["image"]), videos=tuple(sizes["video"]), audios=tuple(sizes["audio"]))
    return Sample(
        members=(("json", _to_json(text)), *media.members.values()),
        conversation=conversation,
        sizes=measured,
        clips=find_clips(conversation, dict(media.members.values()), measured, tables),
        whole=tuple(tables.whole.values()),
        id=record.own_id,
        entry=record.source,
        files=files,
    )


def sample_bytes_bound(record: Record, reader: MediaReader) -> int:
    """Return at most how many bytes the sample takes in a tar, from the sizes of its media alone."""
    places = {}
    names = 0
    for item in iter_media(record.conversation):
        where = item.get(item["type"])
        for frame in where if isinstance(where, list) else [where]:
            places[frame] = reader.size(frame, record.media_root)
            names += 32
    short = map_media(record.conversation, lambda item: {**item, item["type"]: ""})
    text = len(_to_json({"conversation": short, "id": record.id, "source": record.source, "extras": record.extras}))
    return sum(_in_tar(size) for size in (2 * (text + names), *places.values()))  # text may keep its tokens


def measure_item(
    item: Item, contents: Sequence[bytes], tables: ClipTables, limits: MediaLimits = DEFAULT_LIMITS
) -> ImageSize | VideoSize | AudioSize:
    """Return the size of one media item from the header of its member, or members where it is a list of frames."""
    medium = item["type"]
    if medium == "image":
        height, width = probe_image(contents[0], limits, exif_rotate=bool(item.get(EXIF_ROTATE)))
        return ImageSize(height=height, width=width)
    if medium == "audio":
        audio = probe_audio(contents[0], limits, seconds=named_span(item))
        return AudioSize(samples=audio.samples, rate=audio.rate)
    seconds = named_span(item)
    if isinstance(item["video"], list):
        return _measure_frames(contents, item, limits)
    table = tables.walked(contents[0])
    keyframes: tuple[int, ...] = ()
    if isinstance(table, ClipTable) and table.fps:  # else a decoder tells
        video = VideoInfo(table.num_frames, *table.sides, table.fps, table.num_frames / table.fps)
        limits.check_video("convert", video)
        first, video = (0, video) if seconds is None else cut_info(video, table.times, seconds)
        keyframes = table.keyframes_of(first, video.frames)
    else:
        video = probe_video(contents[0], limits=limits, seconds=seconds)
    return VideoSize(
        frames=video.frames,
        height=video.height,
        width=video.width,
        fps=video.fps,
        seconds=video.seconds,
        picked=picked_frames(item, video.frames),
        keyframes=keyframes,
    )


def measure_media(
    conversation: Conversation, contents: dict[str, bytes], tables: ClipTables | None = None
) -> MediaSizes:
    """Return the sizes of a conversation's media, whose bytes are given by member name."""
    sizes: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for item in iter_media(conversation):
        medium = item["type"]
        where = item[medium]
        names = where if isinstance(where, list) else [where]
        try:
            sizes[medium].append(measure_item(item, [contents[name] for name in names], tables or ClipTables()))
        except BadSampleError as error:
            raise BadSampleError(error.stage, error.reason, f"member '{names[0]}': {error}") from error
    return MediaSizes(images=tuple(sizes["image"]), videos=tuple(sizes["video"]), audios=tuple(sizes["audio"]))


def picked_frames(item: Item, num_frames: int) -> tuple[int, ...]:
    """Return the frames that a video item names itself: all of a frame list, its `frame_indices`, or none.

    Frames beyond the clip are moved to its ends by the rule that reads them.
    """
    named = named_frames(item)
    if named is None:
        return tuple(range(num_frames)) if isinstance(item["video"], list) else ()
    return tuple(named)


def _measure_frames(contents: Sequence[bytes], item: Item, limits: MediaLimits) -> VideoSize:
    if not contents:
        raise BadSampleError("convert", "bad_video", "the video is an empty list of frames.")
    limits.check_frames("convert", len(contents))
    sizes = {probe_image(content, limits, exif_rotate=bool(item.get(EXIF_ROTATE))) for content in contents}
    if len(sizes) > 1:
        raise BadSampleError("convert", "bad_video", f"the frames of a video differ in size: {sorted(sizes)}.")
    rate = frame_rate(item) or 0.0
    (height, width), count = sizes.pop(), len(contents)
    seconds = count / rate if rate else 0.0
    picked = picked_frames(item, count)
    return VideoSize(frames=count, height=height, width=width, fps=rate, seconds=seconds, picked=picked)


class _Members:
    """The media members of one sample: what the conversation shows twice is stored once."""

    def __init__(self, record: Record, reader: MediaReader) -> None:
        self.root = record.media_root
        self.reader = reader
        self.members: dict[Any, tuple[str, bytes]] = {}

    def add(self, medium: str, where: Any, *, is_part: bool = False) -> tuple[str, bytes]:
        place = where if isinstance(where, (str, bytes)) else id(where)
        if place not in self.members:
            data = self.reader.read_shared(where, self.root) if is_part else self.reader.read(where, self.root)
            name = f"{len(self.members)}.{_extension(medium, where, data)}"
            stays = is_part and self.reader.kept.stays and data is self.reader.kept.content
            self.members[place] = (where if stays else name, data)
        return self.members[place]


def _extension(medium: str, where: Any, data: bytes) -> str:
    """Return the extension by which readers choose a decoder: what the bytes are, else what the name says."""
    suffix = where[-16:].rpartition(".")[2].lower() if isinstance(where, str) else ""
    known = MEDIA_EXTENSIONS[medium]
    sniffed = next((name for begin, magic, name in _MAGIC if data[begin : begin + len(magic)] == magic), "")
    if sniffed == "mp4":
        sniffed = _ISO_MEDIA[medium]
    if sniffed in known and not (sniffed in ("mp4", "mkv", "jpg") and suffix in ("mov", "m4v", "webm", "jpeg")):
        return sniffed
    return suffix if suffix in known else sniffed or "bin"


def _to_json(data: dict[str, Any]) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # not JSON data, NaN, half of a surrogate pair, too deep
        raise blame_sample(error, "convert", "not_json", "the conversation cannot be written as JSON") from error


def _in_tar(size: int) -> int:
    return 512 + size + -size % 512
