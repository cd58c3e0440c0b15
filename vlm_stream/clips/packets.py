"""Runs of packets become pictures: straight into a decoder, without a container or a seek.

Runs need nothing of each other: threads take them in turns, and end before the pictures are handed out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import BadSampleError, blame_sample, say_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from vlm_stream.clips.cut import ClipCut, ClipRun
    from vlm_stream.clips.table import Codec, Ints

    Frames = npt.NDArray[np.uint8]
    Put = Callable[[int, Frames], None]
    Job = tuple[ClipRun, Sequence[memoryview], Ints, dict[int, int]]


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
        jobs = [
            (run, parts, packets, left)
            for run, parts in zip(self.cut.runs, self.ranges, strict=True)
            for packets, left in [run.unpack()]
            if not set(wanted).isdisjoint(left.values())
        ]
        num_threads = max(min(self.threads, len(jobs)), 1)
        try:
            free = deque(_Decoder(self.cut.codec) for _ in range(num_threads))
        except Exception as error:  # no PyAV, or one without this decoder
            fact = f"PyAV cannot decode {self.cut.codec.name} here ({say_error(error)})"
            raise BadSampleError("decode", "bad_video", fact) from error

        def decode(job: Job) -> None:
            decoder = free.pop()  # there is one for each thread
            try:
                decoder.decode(*job, put)
            finally:
                free.append(decoder)

        if num_threads == 1:
            list(map(decode, jobs))
        else:
            with ThreadPoolExecutor(num_threads, "clip") as pool:
                list(pool.map(decode, jobs))


class Sheet:
    """Pictures in one array, in the order in which they are wanted; threads may put theirs side by side.

    Each is put into its places as it comes, so that it is in memory once.
    """

    def __init__(self, wanted: Sequence[int], height: int, width: int) -> None:
        """Take memory for pictures of that size."""
        self.frames: Frames = np.empty((len(wanted), height, width, 3), np.uint8)
        """[wanted, height, width, 3]"""
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, index in enumerate(wanted):
            self._places[index].append(place)
        self.left = set(wanted)
        """The frames that are wanted still."""

    def put(self, index: int, picture: Frames) -> None:
        """Put a picture into its places, if it has any.

        Raises:
            ValueError: It has another size.
        """
        if picture.shape != self.frames.shape[1:]:
            height, width = self.frames.shape[1:3]
            raise ValueError(f"frame {index} has {picture.shape[1]}x{picture.shape[0]} pixels, not {width}x{height}")
        for place in self._places.get(index, ()):
            self.frames[place] = picture
        self.left.discard(index)


class Colours:
    """Makes arrays [height, width, 3] of a decoder's pictures; one for many: setting up takes longer than using it."""

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        self._reformatter: Any = VideoReformatter()

    def to_array(self, frame: Any, quarters: int) -> Frames:
        """Return a picture turned counter-clockwise by some quarters."""
        picture: Frames = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        return np.ascontiguousarray(np.rot90(picture, quarters)) if quarters else picture


class _Decoder:
    """Decodes one run after the other."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._context = _open(codec)
        self._colours = Colours()

    def decode(self, run: ClipRun, parts: Sequence[memoryview], packets: Ints, left: dict[int, int], put: Put) -> None:
        """Hand over the wanted pictures of a run, `left`, by number, each as it comes."""
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        try:
            self._take(_packets(packets, data), left, put)
        except Exception as error:  # FFmpeg's tree, and what damaged numbers lead to
            fact = f"the pictures at {run.seconds[0]:.2f} s cannot be decoded"
            raise blame_sample(error, "decode", "bad_video", fact) from error
        finally:
            self._context.flush_buffers()
        if left:
            detail = f"frame {min(left.values())}, behind {run.seconds[0]:.2f} s, does not come out of the decoder."
            raise BadSampleError("decode", "bad_video", detail)

    def _take(self, packets: Iterator[Any], left: dict[int, int], put: Put) -> None:
        """Hand over the pictures of `left`, which names them by time, and take them out of it."""
        wanted = set(left)
        # Of pictures that no other needs, only the wanted ones are decoded. Other codecs do not mark them for sure.
        may_skip, skipped = self._codec.name == "h264", ""
        for packet in packets:
            skip = "DEFAULT" if packet is None or packet.pts in wanted else "NONREF"
            if may_skip and skip != skipped:
                self._context.skip_frame = skipped = skip
            for frame in self._context.decode(packet):
                number = left.pop(frame.pts, None)
                if number is not None:
                    _check_size(number, frame, self._codec)
                    put(number, self._colours.to_array(frame, self._codec.turns))
            if not left:
                break


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


def _packets(packets: Ints, data: memoryview) -> Iterator[Any]:
    """Yield the packets of a run, and None: then a decoder gives what it holds back."""
    import av

    for place, size, pts in packets.T.tolist():
        packet: Any = av.Packet(bytes(data[place : place + size]))
        packet.pts = pts
        yield packet
    yield None


def _check_size(number: int, frame: Any, codec: Codec) -> None:
    """Refuse a picture that is not as large as that which the table was made of."""
    if (frame.width, frame.height) != (codec.width, codec.height):
        found, told = f"{frame.width}x{frame.height}", f"{codec.width}x{codec.height}"
        raise ValueError(f"frame {number} has {found} pixels, the clip begins with {told}")
