"""Tiny clips of many codecs and containers, made by ffmpeg; a clip whose encoder is missing is skipped, and says so."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_SOURCE = "-f lavfi -i testsrc2=size={size}:rate={rate}:duration={seconds}"
_SOUND = "-f lavfi -i sine=frequency=440:duration=2"
_X264 = "-c:v libx264 -g 10 -bf 3 -pix_fmt yuv420p"
_OPEN = "-c:v libx264 -bf 3 -x264-params open-gop=1:keyint=10:min-keyint=10 -pix_fmt yuv420p"
_X265 = "-c:v libx265 -pix_fmt yuv420p -x265-params log-level=none:keyint=10:bframes=3:open-gop="
_VP9 = "-c:v libvpx-vp9 -g 10 -b:v 100k -deadline realtime -cpu-used 8"
_AV1 = "-c:v libaom-av1 -g 10 -cpu-used 8 -usage realtime -b:v 100k"
_VFR = "-vf select='not(mod(n\\,3))+gt(n\\,30)' -fps_mode vfr"

CLIPS = {
    "h264_sound.mp4": f"{_SOUND} {_X264} -c:a aac",
    "h264_faststart.mp4": f"{_SOUND} {_X264} -c:a aac -movflags +faststart",
    "h264_fragments.mp4": f"{_SOUND} {_X264} -c:a aac -movflags frag_keyframe+empty_moov",
    "h264.mov": _X264,
    "h264_sound.mkv": f"{_SOUND} {_X264} -c:a aac",
    "h264_open.mp4": _OPEN,
    "h264_open.mkv": _OPEN,
    "h264_one_gop.mp4": f"{_X264} -g 1000",
    "h264_refresh.mp4": f"{_X264} -x264-params intra-refresh=1",
    "h264_vfr.mp4": f"{_VFR} {_X264}",
    "h264_vfr.mkv": f"{_VFR} {_X264}",
    "h264_10bit.mp4": f"{_X264} -pix_fmt yuv420p10le",
    "h264_444_odd.mp4": f"{_X264} -pix_fmt yuv444p",
    "h264_full_range.mp4": f"{_X264} -pix_fmt yuvj420p -color_range pc",
    "h264_bt709.mp4": f"{_X264} -colorspace bt709 -color_primaries bt709 -color_trc bt709",
    "h264_interlaced.mp4": f"{_X264} -flags +ildct+ilme",
    "h264_two_tracks.mp4": f"{_SOURCE.format(size='48x32', rate=25, seconds=2)} -map 0 -map 1 {_X264}",
    "h264_one_frame.mp4": _X264,
    "h264_turned_90.mp4": f"{_X264} -metadata:s:v rotate=90",
    "h264_turned_180.mp4": f"{_X264} -metadata:s:v rotate=180",
    "h264_turned_270.mp4": f"{_X264} -metadata:s:v rotate=270",
    "h264_no_stss.mp4": _X264,
    "h264_co64.mp4": _X264,
    "h264_inband.mp4": f"{_X264} -tag:v avc3",
    "h264_hour.mp4": f"{_X264} -preset ultrafast -bf 2",
    "h264_edit.mp4": _X264,
    "hevc.mkv": f"{_X265}0",
    "hevc_open.mp4": f"{_X265}1",
    "hevc_inband.mp4": f"{_X265}0 -tag:v hev1",
    "hevc_10bit.mp4": f"{_X265}0 -pix_fmt yuv420p10le",
    "vp9.webm": "-c:v libvpx-vp9 -g 10 -b:v 100k -auto-alt-ref 1 -lag-in-frames 8 -deadline realtime -cpu-used 8",
    "vp9_no_cues.webm": f"{_VP9} -live 1",
    "vp9_10bit.webm": f"{_VP9} -pix_fmt yuv420p10le",
    "vp9_odd.mp4": _VP9,
    "vp8.webm": "-c:v libvpx -g 10 -b:v 100k -deadline realtime -cpu-used 8",
    "vp8_hidden.webm": "-c:v libvpx -g 10 -b:v 100k -auto-alt-ref 1 -lag-in-frames 16 -deadline good -cpu-used 8",
    "av1.mp4": _AV1,
    "av1.mkv": _AV1,
    "av1_no_stss.mp4": _AV1,
    "av1_10bit.mp4": f"{_AV1} -pix_fmt yuv420p10le",
    "h264_joined.mkv": _X264,
    "mpeg4.mp4": "-c:v mpeg4 -g 10 -bf 2",
    "mpeg4.avi": "-c:v mpeg4 -g 10",
    "h264.ts": _X264,
    "gif.gif": "",
}
WHOLE = {
    "h264_joined.mkv": "its coding changes on the way",
    "mpeg4.mp4": "the codec is mpeg4",
    "mpeg4.avi": "the container is avi",
    "h264.ts": "the container is mpegts",
    "gif.gif": "the container is gif",
}
"""Clips that have no table, and why."""


@functools.cache
def clip(name: str) -> bytes:
    """Return the bytes of one clip of the corpus."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        if "joined" in name or "inband" in name:  # a stream of bytes has its parameters before each keyframe
            parts = [Path(folder, f"{size}.ts") for size in ("96x64", "160x96")[: 1 + ("joined" in name)]]
            for part in parts:
                _run(f"{_source(name, part.stem)} {CLIPS[name].partition('-tag')[0]}", part)
            tag = "".join(CLIPS[name].partition("-tag")[1:])
            _run(f"-i concat:{'|'.join(map(str, parts))} -c copy {tag}", path)
            return path.read_bytes()
        arguments = f"{_source(name, '63x47' if 'odd' in name else '96x64')} {CLIPS[name]}"
        if "hidden" in name:  # encoders hide pictures that only help others where they see the clip twice
            arguments += f" -passlogfile {path} -pass"
            _run(f"{arguments} 1", path)
            arguments += " 2"
        _run(arguments, path)
        if "edit" in name:  # begins in the middle of a GOP: packets before the first shown frame stay, hidden
            path = _copy(path, f"-ss 0.7 -i {path} -c copy")
        if "turned" in name:  # the muxer writes a display matrix only of what it copies
            path = _copy(path, f"-i {path} -c copy {CLIPS[name][CLIPS[name].index('-metadata') :]}")
        data = path.read_bytes()
    if "no_stss" in name:
        return data.replace(b"stss", b"free")
    return _with_co64(data) if "co64" in name else data


def _source(name: str, size: str) -> str:
    seconds = 0.04 if "one_frame" in name else 3600 if "hour" in name else 2
    return _SOURCE.format(size=size, rate="1/8" if "hour" in name else 25, seconds=seconds)


def _copy(path: Path, arguments: str) -> Path:
    copy = path.with_name(f"copy_{path.name}")
    _run(arguments, copy)
    return copy


def _with_co64(box: bytes) -> bytes:
    """Return boxes with the places of chunks in 64 bits; the index lies behind the data, which so stays in place."""
    found = b""
    while box:
        size, kind = int.from_bytes(box[:4], "big"), box[4:8]
        content, box = box[8:size], box[size:]
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
            content = _with_co64(content)
        if kind == b"stco":
            places = [bytes(4) + content[at : at + 4] for at in range(8, len(content), 4)]
            kind, content = b"co64", content[:8] + b"".join(places)
        found += (len(content) + 8).to_bytes(4, "big") + kind + content
    return found


def _run(arguments: str, path: Path) -> None:
    command = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-y", *_split(arguments), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Unknown encoder" in done.stderr:
        pytest.skip(f"this ffmpeg lacks an encoder: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr


def _split(arguments: str) -> list[str]:
    return [part.replace("'", "") if part.startswith("select") else part for part in arguments.split()]
