"""One record becomes one sample: its members, and the sizes of its media.

Enters: a record and a reader of media. Leaves: `(name, bytes)` members, JSON first, and what the index needs to know;
or `BadSampleError`. Media bytes are never changed and never decoded: only their headers are looked at. Tars and
offsets are not known here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_stream.conversation import MEDIA_TYPES, check_conversation, frame_rate, iter_media, named_frames
from vlm_stream.errors import BadSampleError, blame_sample
from vlm_stream.format import MEDIA_EXTENSIONS
from vlm_stream.media import probe_audio, probe_image, probe_video
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.conversation import Conversation, Item
    from vlm_stream.convert.media_bytes import MediaReader
    from vlm_stream.sources import Record

__all__ = ["Sample", "build_sample", "measure_item", "picked_frames", "sample_bytes_bound"]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sample, ready to be laid into a tar."""

    members: tuple[tuple[str, bytes], ...]
    """Name without the key, and content; `json` first."""
    conversation: Conversation
    """As in the JSON member."""
    sizes: MediaSizes
    """One for each item of the conversation, also where two items share a member."""
    id: str | None = None
    """The record's own; None: it has none."""
    entry: str = ""
    """Name of the meta file's entry, or of the file, that it came from."""


def build_sample(record: Record, reader: MediaReader) -> Sample:
    """Read the record's media and give them member names.

    Raises:
        BadSampleError: A medium cannot be had or its header cannot be read, or the conversation is not JSON.
    """
    check_conversation(record.conversation)
    media = _Members(record, reader)
    conversation = [_copy_message(message) for message in record.conversation]
    sizes: dict[str, list[Any]] = {medium: [] for medium in MEDIA_TYPES}
    for item in iter_media(conversation):
        medium = item["type"]
        where = item.get(medium)
        frames = where if isinstance(where, (list, tuple)) else [where]
        if frames is where and (medium != "video" or not frames):
            raise BadSampleError("convert", "media_not_a_path", f"one {medium} item names {len(where)} media.")
        named = [media.add(medium, frame) for frame in frames]
        item[medium] = [name for name, _ in named] if frames is where else named[0][0]
        try:
            sizes[medium].append(measure_item(item, [data for _, data in named]))
        except BadSampleError as error:
            shown = next((place for place in frames if isinstance(place, str)), f"a {medium} given as bytes")
            raise BadSampleError(error.stage, error.reason, f"{shown[:300]}: {error}") from error
    text: dict[str, Any] = {"conversation": conversation, "id": record.own_id, "source": record.source}
    if record.extras:
        text["extras"] = record.extras
    return Sample(
        members=(("json", _to_json(text)), *media.members.values()),
        conversation=conversation,
        sizes=MediaSizes(images=tuple(sizes["image"]), videos=tuple(sizes["video"]), audios=tuple(sizes["audio"])),
        id=record.own_id,
        entry=record.source,
    )


def sample_bytes_bound(record: Record, reader: MediaReader) -> int:
    """Return at most how many bytes the sample takes in a tar, from the sizes of its media alone."""
    places = {}
    names = 0
    for item in iter_media(record.conversation):
        where = item.get(item["type"])
        for frame in where if isinstance(where, list) else [where]:
            places[frame] = reader.size(frame)
            names += 32
    short = [_copy_message(message, drop_media=True) for message in record.conversation]
    text = len(_to_json({"conversation": short, "id": record.id, "source": record.source, "extras": record.extras}))
    return sum(_in_tar(size) for size in (text + names, *places.values()))


def measure_item(item: Item, contents: Sequence[bytes]) -> ImageSize | VideoSize | AudioSize:
    """Return the size of one media item from the header of its member, or members where it is a list of frames."""
    medium = item["type"]
    if medium == "image":
        height, width = probe_image(contents[0])
        return ImageSize(height=height, width=width)
    if medium == "audio":
        audio = probe_audio(contents[0])
        return AudioSize(samples=audio.samples, rate=audio.rate)
    if isinstance(item["video"], list):
        return _measure_frames(contents, item)
    video = probe_video(contents[0])
    return VideoSize(
        frames=video.frames,
        height=video.height,
        width=video.width,
        fps=video.fps,
        seconds=video.seconds,
        picked=picked_frames(item, video.frames),
    )


def picked_frames(item: Item, num_frames: int) -> tuple[int, ...]:
    """Return the frames that a video item names itself: all of a frame list, its `frame_indices`, or none.

    Frames beyond the clip are moved to its ends by the rule that reads them.

    Raises:
        BadSampleError: `frame_indices` are not frame numbers.
    """
    named = named_frames(item)
    if named is None:
        return tuple(range(num_frames)) if isinstance(item["video"], list) else ()
    return tuple(named)


def _measure_frames(contents: Sequence[bytes], item: Item) -> VideoSize:
    if not contents:
        raise BadSampleError("convert", "bad_video", "the video is an empty list of frames.")
    sizes = {probe_image(content) for content in contents}
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

    def add(self, medium: str, where: Any) -> tuple[str, bytes]:
        place = where if isinstance(where, (str, bytes)) else id(where)
        if place not in self.members:
            data = self.reader.read(where, self.root)
            self.members[place] = (f"{len(self.members)}.{_extension(medium, where, data)}", data)
        return self.members[place]


def _extension(medium: str, where: Any, data: bytes) -> str:
    """Return the extension by which readers choose a decoder: what the bytes are, else what the name says."""
    suffix = where[-16:].rpartition(".")[2].lower() if isinstance(where, str) else ""
    known = MEDIA_EXTENSIONS[medium]
    sniffed = next((name for begin, magic, name in _MAGIC if data[begin : begin + len(magic)] == magic), "")
    if sniffed in known and not (sniffed in ("mp4", "mkv", "jpg") and suffix in ("mov", "m4v", "webm", "jpeg")):
        return sniffed
    return suffix if suffix in known else sniffed or "bin"


def _copy_message(message: dict[str, Any], *, drop_media: bool = False) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [dict(item) for item in content]
        for item in content:
            if drop_media and item.get("type") in MEDIA_TYPES:
                item[item["type"]] = ""
    return {**message, "content": content}


def _to_json(data: dict[str, Any]) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # not JSON data, NaN, half of a surrogate pair, too deep
        raise blame_sample(error, "convert", "not_json", "the conversation cannot be written as JSON") from error


def _in_tar(size: int) -> int:
    return 512 + size + -size % 512
