"""Frames of long clips, from S3 with 30 ms a request: bytes, requests, seconds and memory for each clip.

    python benchmarks/video.py [--length L] [--clips FOLDER] [--gbit N] [clips] [convert]

`clips`: 8, 32 and 128 frames of clips of 30 s (also at 2 frames a second), 5 min and 60 min (H.264, 320x180, a keyframe
every 2 s, with sound), and of 60 min at 1080p. `frames` decodes by as many threads as this machine has cores, up to 8.
Ways: `frames` (tables of clips: ranges, and packets into PyAV), `whole` (this package without tables: the whole file,
into PyAV), `decord` (the file downloaded, then decord), `torchcodec` (on a file-like object of
fsspec over the same S3 client, approximate seeks). Each way and length is a process of its own, in turns; all read from
one SeaweedFS server behind one proxy, which adds the latency and counts requests and bytes. Loopback makes a download
nearly free; `--gbit` limits what all connections of the proxy carry together. `core s` is the processor time of the
reading process alone, so what a core of builders reads when they wait for nothing; server and proxy share the machine.

One clip at a time measures how long a clip takes; clips a second of runs that read ahead are in `video_runs`.

`convert`: clips a second with and without tables, local, one process, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LATENCY_S = 0.03
WAYS = ("frames", "whole", "decord", "torchcodec")
BUCKET_PATH = "clips"


class Case(NamedTuple):
    """A clip, and how many frames of it are read."""

    seconds: int
    frames: tuple[int, ...] = (8, 32, 128)
    size: str = "320x180"
    repeats: int = 3


CASES = {
    "30 s": Case(30, (8, 32, 60, 128)),  # 60: two a second
    "5 min": Case(300),
    "60 min": Case(3600),
    "1080p": Case(3600, (8, 32), "1920x1080", repeats=1),
}


def make_clip(folder: Path, case: Case) -> Path:
    """Return an mp4 of that length; long ones repeat a part, whose pictures are coded once."""
    seconds, part = case.seconds, 60 if case.size == "320x180" else 10
    path = folder / f"{case.size}-{seconds}.mp4"
    if path.exists():
        return path
    if seconds > part:
        once = make_clip(folder, case._replace(seconds=part))
        _ffmpeg(f"-stream_loop {seconds // part - 1} -i {once} -c copy {path}")
    else:
        is_small = case.size == "320x180"
        noise, quality = (",noise=alls=8:allf=t:all_seed=1", 30) if is_small else ("", 38)
        source = f"testsrc2=size={case.size}:rate=25:duration={seconds}{noise}"
        sound = f"-f lavfi -i sine=frequency=440:duration={seconds} -c:a aac"
        code = f"-c:v libx264 -preset ultrafast -bf 2 -g 50 -keyint_min 50 -crf {quality} -pix_fmt yuv420p"
        _ffmpeg(f"-f lavfi -i {source} {sound} {code} -movflags +faststart {path}")
    return path


def _ffmpeg(arguments: str) -> None:
    subprocess.run(["ffmpeg", "-loglevel", "error", "-nostdin", "-y", *arguments.split()], check=True)


def write_records(folder: Path, files: list[Path]) -> Path:
    """Write a conversation about each clip or image."""
    path = folder / "records.jsonl"
    with path.open("w") as lines:
        for number, file in enumerate(files):
            medium = "image" if file.suffix == ".jpg" else "video"
            asked = [{"type": medium, medium: str(file)}, {"type": "text", "text": "What?"}]
            answer = {"role": "assistant", "content": [{"type": "text", "text": "That."}]}
            turns = [{"role": "user", "content": asked}, answer]
            lines.write(json.dumps({"id": str(number), "conversation": turns}) + "\n")
    return path


# --- One way, in a process of its own -----------------------------------------------------------------------------


def run_way(way: str, place: dict[str, Any]) -> None:
    """Read the frames of one clip as often as asked; print seconds, frames' checksum, and memory."""
    read = READERS[way](place)
    before = _memory("VmRSS")
    for line in sys.stdin:
        num_frames = int(line)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
        begin, begin_cpu = time.perf_counter(), time.process_time()
        frames = read(num_frames)
        answer = {
            "seconds": time.perf_counter() - begin,
            "cpu": time.process_time() - begin_cpu,
            "sum": int(frames.sum()),
            "count": len(frames),
            "memory": max(_memory("VmHWM") - before, 0),
        }
        print(json.dumps(answer), flush=True)


def _memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _rule(num_frames: int) -> Any:
    from vlm_stream.tokens import FrameRule

    return FrameRule(fps=None, max_frames=num_frames)


def _options(place: dict[str, Any]) -> Any:
    from vlm_stream.storage import StoreOptions

    return StoreOptions(endpoint=place["endpoint"], region="us-east-1", allow_http=True)


def _open(place: dict[str, Any]) -> tuple[Any, Any, Any]:
    from vlm_stream.format import IndexCache, OpenDataset
    from vlm_stream.storage import ReadOptions, SpanReader

    dataset = OpenDataset(place["url"], _options(place), IndexCache())
    (drawn,) = dataset.draw(place["shard"], [0])
    return dataset, drawn, SpanReader(ReadOptions(), _options(place))


def read_frames(place: dict[str, Any]) -> Callable[[int], Any]:
    """Ranges of the picked frames; the table is read each time, as it is of a sample that is drawn."""
    from vlm_stream.blueprint import Piece
    from vlm_stream.build.builder import join_parts
    from vlm_stream.cutting import Cutter
    from vlm_stream.loader_options import LoaderOptions
    from vlm_stream.media import decode_picked
    from vlm_stream.storage import ReadOptions
    from vlm_stream.tokens import frame_indices
    from vlm_stream.world import World

    dataset, drawn, reader = _open(place)
    whole = read_whole(place)
    threads = LoaderOptions().threads_of(World(0, 1))

    def read(num_frames: int) -> Any:
        rule = _rule(num_frames)
        cutter = Cutter(rule, ReadOptions())
        data = dataset.tables([drawn.table])[0].result() if cutter.may_cut(drawn) else None
        cut = None if data is None else cutter.cut(drawn, data)
        if cut is None:
            return whole(num_frames)
        piece = Piece((0, 0, 0), drawn.key, 0, drawn.span, drawn.sizes, (), parts=cut[0], clips=cut[1])
        members = join_parts(piece, iter(reader.begin(piece.reads).results()), threads)
        return decode_picked(members["0.mp4"], lambda info: frame_indices(info.frames, info.fps, rule).tolist()).frames

    return read


def read_whole(place: dict[str, Any]) -> Callable[[int], Any]:
    """The sample as it is read without tables."""
    from vlm_stream.media import decode_video
    from vlm_stream.tokens import frame_indices

    _, drawn, reader = _open(place)

    def read(num_frames: int) -> Any:
        (members,) = reader.begin([drawn.span]).results()
        rule = _rule(num_frames)
        return decode_video(members["0.mp4"], lambda info: frame_indices(info.frames, info.fps, rule).tolist()).frames

    return read


def read_decord(place: dict[str, Any]) -> Callable[[int], Any]:
    """The file in one GET, then decord as its documentation has it."""
    import decord
    import numpy as np

    from vlm_stream.storage import open_store

    store = open_store(place["url"], _options(place))

    def read(num_frames: int) -> Any:
        video = decord.VideoReader(io.BytesIO(store.get(place["file"])), num_threads=1)
        return video.get_batch(np.rint(np.linspace(0, len(video) - 1, num_frames)).astype(int).tolist()).asnumpy()

    return read


def read_torchcodec(place: dict[str, Any]) -> Callable[[int], Any]:
    """A file-like object of fsspec, which torchcodec reads where it seeks."""
    import numpy as np
    from obstore.fsspec import FsspecStore
    from torchcodec.decoders import VideoDecoder

    files = FsspecStore("s3", endpoint=place["endpoint"], region="us-east-1", client_options={"allow_http": True})
    path = f"{place['url'].removeprefix('s3://')}/{place['file']}"

    def read(num_frames: int) -> Any:
        with files.open(path, "rb", buffer_size=place.get("buffer")) as file:
            video = VideoDecoder(file, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate")
            picks = np.rint(np.linspace(0, len(video) - 1, num_frames)).astype(int).tolist()
            return video.get_frames_at(picks).data.numpy()

    return read


READERS = {"frames": read_frames, "whole": read_whole, "decord": read_decord, "torchcodec": read_torchcodec}

# --- The table ----------------------------------------------------------------------------------------------------


def measure_clips(folder: Path, args: argparse.Namespace) -> None:
    """Print bytes, requests, seconds and memory of every way, length and number of frames."""
    from benchmarks.peers.proxy import CountingProxy
    from tests.servers import S3Server
    from vlm_stream.convert import make_shards
    from vlm_stream.storage import open_store

    clips = [make_clip(args.kept, case) for case in args.cases.values()]
    make_shards(write_records(folder, clips), folder / "shards", samples_per_shard=1, workers=1)
    (folder / "s3").mkdir()
    with S3Server(folder / "s3") as server:
        os.environ.update(server.environment)
        url = server.url(BUCKET_PATH)
        store = open_store(url, server.options)
        for path in (*(path for path in (folder / "shards").iterdir() if path.is_file()), *clips):
            store.put(path.name, path)
        limit = args.gbit * 1e9 / 8 if args.gbit else float("inf")
        with CountingProxy(("127.0.0.1", server.port), LATENCY_S, limit) as proxy:
            _print_row("clip", "frames", "way", "MB", "of the file", "requests", "s", "core s", "memory MB")
            for shard, (name, clip) in enumerate(zip(args.cases, clips, strict=True)):
                place = {"endpoint": proxy.endpoint, "url": url, "shard": shard, "file": clip.name}
                _measure_case(name, clip.stat().st_size, place, proxy)


def _print_row(*cells: str) -> None:
    print(" ".join(f"{cell:>11}" for cell in cells), flush=True)


def _measure_case(name: str, size: int, place: dict[str, Any], proxy: Any) -> None:
    ways = [way for way in WAYS if way in ("frames", "whole") or importlib.util.find_spec(way)]
    running = {way: _start(way, place) for way in ways}
    for num_frames in CASES[name].frames:
        sums = {}
        for way, process in running.items():
            found = [_ask(process, num_frames, proxy) for _ in range(CASES[name].repeats)]
            answer = {key: statistics.median(each[key] for each in found) for key in found[0]}
            sums[way] = (answer["count"], answer["sum"])
            _print_row(
                *(name, str(num_frames), way),
                *(f"{answer['bytes'] / 1e6:.2f}", f"{answer['bytes'] / size:.1%}", f"{answer['requests']:.0f}"),
                *(f"{answer['seconds']:.3f}", f"{answer['cpu']:.3f}", f"{answer['memory'] / 1e6:.0f}"),
            )
        if sums["frames"] != sums["whole"]:
            raise SystemExit(f"the frames differ: {sums}")
    for process in running.values():
        process.communicate(timeout=30)


def _start(way: str, place: dict[str, Any]) -> Any:
    command = [sys.executable, __file__, "--way", way, "--place", json.dumps(place)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: Any, num_frames: int, proxy: Any) -> dict[str, Any]:
    if not getattr(process, "is_warm", False):
        process.is_warm = True
        _answer(process, 2)
    proxy.reset()
    return _answer(process, num_frames) | {"bytes": proxy.num_bytes, "requests": proxy.requests}


def _answer(process: Any, num_frames: int) -> dict[str, Any]:
    process.stdin.write(f"{num_frames}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def measure_conversion(folder: Path, args: argparse.Namespace) -> None:
    """Print clips a second with and without tables, and the size of the tables."""
    from unittest import mock

    from vlm_stream.convert import make_shards

    clip = make_clip(args.kept, CASES["30 s"])
    records = write_records(folder, [clip] * 30)
    speeds: dict[str, list[float]] = {"without tables": [], "with tables": []}
    for number, name in enumerate([*speeds] * 4):
        out = folder / f"convert-{number}"
        patch = mock.patch("vlm_stream.convert.clip_tables.parse_clip", return_value="off")
        begin = time.perf_counter()
        with patch if name == "without tables" else contextlib.nullcontext():
            make_shards(records, out, samples_per_shard=10, workers=1)
        if number >= 2:  # the first round is warm-up
            speeds[name].append(len(records.read_text().splitlines()) / (time.perf_counter() - begin))
    tables = sum(path.stat().st_size for path in out.glob("*.clips.bin"))
    without, with_tables = (statistics.median(each) for each in speeds.values())
    num_frames = 750 * len(records.read_text().splitlines())
    print(
        f"conversion: {with_tables:.1f} clips/s with tables, {without:.1f} without, ratio {with_tables / without:.2f}"
    )
    print(f"tables: {tables / num_frames:.2f} bytes a frame, {clip.stat().st_size / 1e6:.1f} MB a clip of 30 s")


def main() -> None:
    """Run the figures that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", default=["clips", "convert"])
    parser.add_argument("--length", choices=CASES, help="clips of this kind alone")
    parser.add_argument("--gbit", type=float, help="what the network carries; by default nothing limits it")
    parser.add_argument("--clips", metavar="FOLDER", help="keep the clips there, for the next run")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        run_way(args.way, json.loads(args.place))
        return
    args.cases = {args.length: CASES[args.length]} if args.length else CASES
    with tempfile.TemporaryDirectory() as temporary:
        args.kept = Path(args.clips or temporary)
        for figure in args.figures:
            folder = Path(temporary, figure)
            folder.mkdir()
            {"clips": measure_clips, "convert": measure_conversion}[figure](folder, args)


if __name__ == "__main__":
    main()
