"""A file becomes the table of its packets, or the reason why it has none.

FFmpeg walks the packets; what it says of edit lists, fragments, sample tables and cues is in their times and places. A
place is taken only if the packet's own bytes lie there: files whose demuxer changes bytes are read whole.
"""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.clips.table import CODECS, MOST_PACKETS, ClipTable, Codec
from vlm_stream.storage import crc32c_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_CONTAINERS: Final = ("mov", "matroska")
_PLAIN_FORMATS: Final = frozenset({"yuv420p", "yuvj420p", "yuv444p", "yuvj444p"})
_BLOCK_HEADER: Final = 64
"""Matroska's packets are told by the element around them: its header is shorter than this."""
_CHANGES: Final = frozenset(("new_extradata", "param_change", "palette"))
"""What a demuxer may hand to the decoder beside a packet's bytes."""
_CHANGED: Final = "its coding changes on the way"
_VP8_SHOWN: Final = 0x10
_SHOWN, _DISCARDED, _NO_PICTURE = range(3)
"""What becomes of a packet: the edit list hides some, some give no picture."""
_IDR: Final = 5
_SEI: Final = 6
_SPS: Final = 7
_RECOVERY_POINT: Final = 6
_LONG: Final = 255
"""The length goes on in the next byte: encoders' settings, which stand behind what is looked for."""
_IRAP: Final = range(16, 24)
_HEVC_SPS: Final = 33


def open_file(data: bytes | bytearray | memoryview | str | Path, container: str) -> Any:
    """Open the bytes of a file, or the file at a path, by PyAV.

    `container` is FFmpeg's name for it, told from a closed list: left to itself FFmpeg may take bytes for a text that
    names other files, and a path for a protocol.
    """
    import av

    source = str(Path(data).absolute()) if isinstance(data, (str, Path)) else io.BytesIO(data)
    return av.open(source, format=container, options={"protocol_whitelist": "file"})


def parse_clip(data: bytes, container: str) -> ClipTable | str:
    """Return the table, or why there is none: the file is then read whole, and its faults are found there."""
    try:
        with open_file(data, container) as file:
            if not file.streams.video:
                return "no video stream"
            if container not in _CONTAINERS:
                return f"the container is {container}"
            return _walk(data, file, file.streams.video[0])
    except Exception as error:  # damaged files lead FFmpeg and its numbers anywhere
        return f"FFmpeg cannot walk it ({type(error).__name__})"


def _walk(data: bytes, container: Any, stream: Any) -> ClipTable | str:
    import av

    context = stream.codec_context
    if context.name not in CODECS:
        return f"the codec is {context.name}"
    context.thread_type = "NONE"
    first = None
    packets: list[tuple[int, int, int, int]] = []  # offset, size, time, what becomes of it
    begins: list[int] = []
    known = bytes(context.extradata or b"")
    num_keyframes = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        content = bytes(packet)
        offset = _find(data, content, packet.pos) if packet.pos else -1
        if offset < 0:
            return "its packets are not stored as they are decoded"
        if packet.pts is None:
            return "a packet has no time"
        if any(beside.data_type in _CHANGES for beside in packet.iter_sidedata()):
            return _CHANGED
        if not packets:
            # Only a picture tells how it is turned, cropped and interlaced; this one may be hidden.
            first = next(iter([*context.decode(av.Packet(content)), *context.decode(None)]), None)
            known += content
        if packet.is_keyframe:
            num_keyframes += 1
            if any(unit not in known for unit in _parameters(content, context)):
                return _CHANGED
            if _is_entry(content, context):
                begins.append(len(packets))
        fate = _DISCARDED if packet.is_discard else _SHOWN if gives_picture(packet, context.name) else _NO_PICTURE
        packets.append((offset, len(content), packet.pts, fate))
    if first is None or not begins or begins[0]:
        return "it does not begin with a picture that stands alone"
    if (first.width, first.height) != (context.width, context.height):
        return "its pictures are cropped by the container"
    is_plain = num_keyframes == len(begins) and _is_plain(stream, first, num_keyframes)
    columns = [np.array(column, np.int64) for column in (*zip(*packets, strict=True), begins)]
    rate = stream.average_rate or stream.guessed_rate or Fraction(0)
    return _table(data, _codec(stream, first), (rate.numerator, rate.denominator), is_plain, columns)


def _find(data: bytes, content: bytes, begin: int) -> int:
    """Return where a packet lies that is said to lie at some place; below 0: it is not there as it is."""
    # A search prepares itself before it looks.
    return begin if data.startswith(content, begin) else data.find(content, begin, begin + len(content) + _BLOCK_HEADER)


def _is_plain(stream: Any, first: Any, num_keyframes: int) -> bool:
    """Tell whether all libraries read a file alike, as far as its header and its first picture tell.

    Some begin at each picture that the index calls a keyframe, which without a table of keyframes is every one.
    """
    is_told = sum(entry.is_keyframe for entry in stream.index_entries) <= num_keyframes
    return is_told and first.format.name in _PLAIN_FORMATS and not first.interlaced_frame


def _codec(stream: Any, first: Any) -> Codec:
    context = stream.codec_context
    colour = (context.color_range, context.colorspace, context.color_primaries, context.color_trc)
    return Codec(
        name=context.name,
        extradata=bytes(context.extradata or b""),
        width=context.width,
        height=context.height,
        colour=tuple(map(int, colour)),
        turns=round(first.rotation / 90) % 4,
        time_base=(stream.time_base.numerator, stream.time_base.denominator),
    )


def _table(data: bytes, codec: Codec, rate: tuple[int, int], is_plain: bool, columns: list[Ints]) -> ClipTable | str:
    offset, size, pts, fate, begins = columns
    shown = fate == _SHOWN
    if np.any(offset[1:] < offset[:-1] + size[:-1]):
        return "its packets do not lie in the order in which they are decoded"
    if len(pts) > MOST_PACKETS:
        return f"it has more than {MOST_PACKETS:,} pictures"
    if len(np.unique(pts[fate != _NO_PICTURE])) < np.sum(fate != _NO_PICTURE):
        return "two pictures have one time"
    if not shown.any():
        return "its edit list shows nothing"
    # Closed: what is decoded before a keyframe is shown before it, and what is decoded behind it, behind it.
    latest, earliest = np.maximum.accumulate(pts), np.minimum.accumulate(pts[::-1])[::-1]
    is_closed = np.all(pts[begins] == earliest[begins]) and np.all(latest[begins[1:] - 1] < earliest[begins[1:]])
    is_plain = is_plain and bool(is_closed) and bool(shown.all())
    crc32c = np.zeros(len(begins), np.int64)
    table = ClipTable(codec, is_plain, rate, int(pts[shown].min()), offset, size, pts, shown, begins, crc32c)
    view = memoryview(data)
    ranges = (table.gop_range(gop) for gop in range(table.num_gops))
    crc32c[:] = [crc32c_of(view[begin : begin + length]) for begin, length in ranges]
    return table


def gives_picture(packet: Any, codec: str) -> bool:
    """Tell whether a picture comes of a packet: some of VP8 only help those behind them."""
    return codec != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN)


def _is_entry(content: bytes, context: Any) -> bool:
    """Tell whether decoding may begin with a packet that the container calls a keyframe.

    The first picture of a slow refresh is called one as well, and where the table of keyframes is missing every picture
    is. True ones: in H.264 an IDR picture, or a recovery point that is reached at once; in HEVC the kinds that say so.
    """
    extradata = context.extradata or b""
    if context.name == "h264":
        for unit in _units(content, extradata[4:5]):
            if unit[0] & 31 == _IDR:
                return True
            if unit[0] & 31 == _SEI and _recovers_at_once(unit):
                return True
        return False
    if context.name == "hevc":
        return any(unit[0] >> 1 & 63 in _IRAP for unit in _units(content, extradata[21:22]))
    return True


def _parameters(content: bytes, context: Any) -> Iterator[bytes]:
    """Yield what a packet of H.264 or HEVC says of the sizes and forms of pictures, as far as it does."""
    extradata = context.extradata or b""
    if context.name == "h264":
        yield from (unit for unit in _units(content, extradata[4:5]) if unit[0] & 31 == _SPS)
    elif context.name == "hevc":
        yield from (unit for unit in _units(content, extradata[21:22]) if unit[0] >> 1 & 63 == _HEVC_SPS)


def _units(content: bytes, length_byte: bytes) -> Iterator[bytes]:
    """Yield the beginnings of the NAL units of a packet, each behind its length."""
    width = (length_byte[0] & 3) + 1 if length_byte else 4
    at = 0
    while at + width < len(content):
        length = int.from_bytes(content[at : at + width], "big")
        yield content[at + width : at + width + min(max(length, 1), 256)]
        at += width + length


def _recovers_at_once(unit: bytes) -> bool:
    """Tell whether an SEI unit holds a recovery point whose count of frames is 0."""
    at = 1
    while at + 2 < len(unit):
        kind = unit[at]
        length = unit[at + 1]
        if kind == _RECOVERY_POINT:
            return bool(unit[at + 2] & 0x80)  # 0 is the one Exp-Golomb number that begins with a 1
        if length == _LONG:
            return False
        at += 2 + length
    return False
