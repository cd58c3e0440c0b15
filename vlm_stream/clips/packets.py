"""Runs of packets become pictures: straight into a decoder, without a container or a seek.

Runs need nothing of each other: threads take them in turns, and end before the pictures are handed out.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import compress
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import BadSampleError, blame_sample, say_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.clips.cut import ClipCut, ClipRun
    from vlm_stream.clips.table import Codec

    Frames = npt.NDArray[np.uint8]
    Put = Callable[[int, Frames], None]


@dataclass(frozen=True, slots=True, eq=False)
class PickedClip:
    """The bytes that hold some frames of a clip."""

    cut: ClipCut
    facts: tuple[int, int, int, float, float]
    """Frames, height, width, frames per second and seconds of the clip, or of the GOPs of which its parts are cut."""
    ranges: Sequence[Sequence[memoryview]]
    """Those of each run, checked."""
    spans: Mapping[tuple[float, float | None], tuple[int, int]] = field(default_factory=dict)
    """Start and end of each part that is shown -> its first frame and number of frames."""

    threads: int = 1
    """Most threads that decode at a time."""

    def decode(self, wanted: Collection[int], put: Put) -> None:
        """Hand over the pictures [height, width, 3] of the runs that hold some of the planned frames, by number.

        Raises:
            BadSampleError: One of them cannot be decoded.
        """
        holds = [not set(wanted).isdisjoint(run.wanted().values()) for run in self.cut.runs]
        runs, ranges = list(compress(self.cut.runs, holds)), list(compress(self.ranges, holds))
        num_threads = max(min(self.threads, len(runs)), 1)
        try:
            free = deque(_Decoder(self.cut.codec) for _ in range(num_threads))
        except Exception as error:  # no PyAV, or one without this decoder
            fact = f"PyAV cannot decode {self.cut.codec.name} here ({say_error(error)})"
            raise BadSampleError("decode", "bad_video", fact) from error

        def decode(run: ClipRun, parts: Sequence[memoryview]) -> None:
            decoder = free.pop()  # there is one for each thread
            try:
                decoder.decode(run, parts, put)
            finally:
                free.append(decoder)

        if num_threads == 1:
            list(map(decode, runs, ranges))
        else:
            with ThreadPoolExecutor(num_threads, "clip") as pool:
                list(pool.map(decode, runs, ranges))


class _Decoder:
    """Decodes one run after the other."""

    def __init__(self, codec: Codec) -> None:
        from av.video.reformatter import VideoReformatter

        self._codec = codec
        self._context = _open(codec)
        self._colours: Any = VideoReformatter()  # one for all pictures: to set it up takes longer than to use it

    def decode(self, run: ClipRun, parts: Sequence[memoryview], put: Put) -> None:
        """Hand over the wanted pictures of a run by number, each as it comes."""
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        try:
            found = set()
            with closing(_decode_run(self._context, run, data, Fraction(*self._codec.time_base))) as frames:
                for index, frame in frames:
                    _check_size(index, frame, self._codec)
                    picture = self._colours.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    put(index, turn(picture, self._codec.turns))
                    found.add(index)
        except Exception as error:  # FFmpeg's tree, and what damaged numbers lead to
            fact = f"the pictures at {run.seconds[0]:.2f} s cannot be decoded"
            raise blame_sample(error, "decode", "bad_video", fact) from error
        if lost_frames := set(run.wanted().values()) - found:
            lost = min(lost_frames)
            detail = f"frame {lost}, behind {run.seconds[0]:.2f} s, does not come out of the decoder."
            raise BadSampleError("decode", "bad_video", detail)


def _open(codec: Codec) -> Any:
    import av

    context: Any = av.CodecContext.create(codec.name, "r")
    context.thread_type = "NONE"
    context.extradata = codec.extradata
    context.width, context.height = codec.width, codec.height
    context.color_range, context.colorspace, context.color_primaries, context.color_trc = codec.colour
    if codec.name == "h264":
        # Without it the decoder guesses how many pictures are out of order, and drops those that prove it wrong.
        context.options = {"strict": "1"}
    return context


def _decode_run(context: Any, run: ClipRun, data: memoryview, time_base: Any) -> Generator[tuple[int, Any], None, None]:
    """Yield the wanted frames of a run with their numbers, in the decoder's colours."""
    import av

    wanted = run.wanted()
    left = set(wanted)
    # Of pictures that no other needs, only the wanted ones are decoded. Other codecs do not mark them for sure.
    is_skipping = context.name == "h264"
    packets: list[Any] = []
    for place, size, pts in run.packets():
        packet = av.Packet(bytes(data[place : place + size]))
        packet.pts = pts
        packet.time_base = time_base
        packets.append(packet)
    try:
        for packet in (*packets, None):  # None: what the decoder holds back
            if is_skipping and packet is not None:
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            for frame in context.decode(packet):
                if frame.pts in left:
                    left.remove(frame.pts)
                    yield wanted[frame.pts], frame
            if not left:
                break
    finally:
        context.flush_buffers()


def _check_size(number: int, frame: Any, codec: Codec) -> None:
    """Refuse a picture that is not as large as that which the table was made of."""
    if (frame.width, frame.height) != (codec.width, codec.height):
        found, told = f"{frame.width}x{frame.height}", f"{codec.width}x{codec.height}"
        raise ValueError(f"frame {number} has {found} pixels, the clip begins with {told}")


def turn(picture: Frames, quarters: int) -> Frames:
    """Return a picture turned counter-clockwise by some quarters."""
    import numpy as np

    return np.ascontiguousarray(np.rot90(picture, quarters)) if quarters else picture
