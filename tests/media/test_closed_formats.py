"""Formats are told by content, from closed lists; media ask no host and read no file beside their own."""

from __future__ import annotations

import contextlib
import http.server
import io
import shutil
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from tests.media.test_video_decoding import BACKENDS, _needs
from vlm_stream.convert.clip_tables import make_table
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.media import (
    DEFAULT_LIMITS,
    MediaLimits,
    VideoInfo,
    check_container,
    decode_audio,
    decode_frame_list,
    decode_image,
    decode_video,
    probe_audio,
    probe_image,
    probe_video,
)
from vlm_stream.testing import make_jpeg, make_mp4, make_wav

if TYPE_CHECKING:
    from collections.abc import Iterator

DASH = (
    '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011" type="static" '
    'mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="video/mp4"><Representation id="a" bandwidth="1">'
    '<BaseURL>{place}</BaseURL><SegmentBase indexRange="0-10"/></Representation></AdaptationSet></Period></MPD>'
)
SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 0 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
IMF = '<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/2016"/>'
TEXTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{place}\n#EXT-X-ENDLIST\n",
    "hls_behind_id3": "ID3\x04\0\0\0\0\0\0#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{place}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile {place}\n",
    "concat_script": "file '{place}'\n",
    "dash": '<?xml version="1.0"?>' + DASH,
    "dash_as_mp4": "\x01\x01\x01\x01ftypjp2 " + DASH,
    "dash_as_gif": "GIF89a" + DASH,
    "imf_as_ogg": "OggS" + IMF + "{place}",
    "session": SDP,
    "session_as_flv": "FLV\x01\n" + SDP,
    "session_as_mkv": "\x1a\x45\xdf\xa3\x90matroska\n" + SDP,
    "smil": '<smil><body><video src="{place}"/></body></smil>',
    "asx": '<asx version="3.0"><entry><ref href="{place}"/></entry></asx>',
    "address": "{place}",
    "rtsp_mov": "RTSPtext{place}\r",
}


@contextlib.contextmanager
def _counting_server(content: bytes) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/clip.mp4", asked
        server.shutdown()


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("as_file", [False, True])
def test_texts_that_name_media_are_refused_before_a_decoder_sees_them(kind, backend, as_file, tmp_path):
    """Neither the host nor the file that they name is touched, and nothing waits for packets."""
    _needs(backend)
    clip = make_mp4(num_frames=4)
    secret = tmp_path / "elsewhere.mp4"
    secret.write_bytes(clip)
    with _counting_server(clip) as (url, asked):
        for place in (url, str(secret), f"file://{secret}", f"concat:{secret}"):
            data = TEXTS[kind].format(place=place).encode("latin-1")
            data += b" " * max(0, 400 - len(data))
            if as_file:
                (tmp_path / "clip.mp4").write_bytes(data)
            given = tmp_path / "clip.mp4" if as_file else data
            decode_video(clip, _first, backend)  # imports take their time
            begin = time.monotonic()
            for use in (lambda given: probe_video(given, backend), lambda given: decode_video(given, _first, backend)):
                with pytest.raises(BadSampleError, match="no video file of a kind that is read") as caught:
                    use(given)
                assert caught.value.reason == "unknown_container"
            assert isinstance(make_table(data), str)
            assert time.monotonic() - begin < 5, "something was waited for"  # a session description: 10 to 20 s
        assert asked == []


def _first(info: object) -> list[int]:
    return [0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["url ", "alis", "rmra", "cmov"])
def test_movies_that_keep_their_pictures_elsewhere_are_refused(kind, backend):
    _needs(backend)
    data = make_mp4(num_frames=4)
    own = b"\0\0\0\x0curl \0\0\0\1"
    assert data.count(own) == 1
    if kind in ("rmra", "cmov"):
        data += _box(b"moov", _box(kind.encode(), bytes(8)))
    else:
        data = data.replace(own, b"\0\0\0\x0c" + kind.encode() + b"\0\0\0\0")
    with pytest.raises(BadSampleError, match=r"refers to other files.*Write it as one file") as caught:
        decode_video(data, _first, backend)
    assert caught.value.reason == "outside_reference"


def _element(kind: int, content: bytes) -> bytes:
    name = kind.to_bytes((kind.bit_length() + 7) // 8, "big")
    return name + (len(content) | 1 << 56).to_bytes(8, "big") + content


@pytest.mark.parametrize(
    "links",
    [
        _element(0x1549A966, _element(0x3EB923, b"x" * 16)),
        _element(0x1043A770, _element(0x45B9, _element(0xB6, _element(0x6E67, b"x" * 16)))),
    ],
)
def test_linked_segments_are_refused(links):
    header = _element(0x1A45DFA3, _element(0x4282, b"matroska"))
    assert check_container(header + _element(0x18538067, _element(0xEC, b"void")), "decode") == "matroska"
    with pytest.raises(BadSampleError, match=r"refers to other files \(Matroska's \w+UUID\)"):
        check_container(header + _element(0x18538067, links), "decode")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", "-c:v libx264"),
        ("a.mov", "-c:v libx264"),
        ("fragments.mp4", "-c:v libx264 -movflags frag_keyframe+empty_moov"),
        ("a.mkv", "-c:v libx264"),
        ("a.webm", "-c:v libvpx"),
        ("a.avi", "-c:v mpeg4"),
        ("a.flv", "-c:v flv1"),
        ("a.gif", ""),
        ("a.ogv", "-c:v libtheora"),
        ("a.wmv", "-c:v wmv2"),
        ("a.mpg", "-c:v mpeg2video"),
        ("a.ts", "-c:v libx264"),
        ("a.m2ts", "-c:v libx264"),
        ("a.3gp", "-c:v mpeg4"),
        ("a.ivf", "-c:v libvpx"),
    ],
)
def test_all_containers_of_the_list_are_decoded(name, options, tmp_path):
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    path = tmp_path / name
    source = "-f lavfi -i testsrc2=size=64x48:rate=25:duration=0.4"
    made = subprocess.run(
        ["ffmpeg", "-v", "error", *source.split(), "-pix_fmt", "yuv420p", *options.split(), str(path)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip(f"this ffmpeg cannot write it: {made.stderr.decode()[-200:]}")
    info = probe_video(path.read_bytes())
    assert (info.height, info.width) == (48, 64)
    assert decode_video(path, _first).frames.shape == (1, 48, 64, 3)


def test_a_file_of_endless_boxes_ends(monkeypatch):
    monkeypatch.setattr("vlm_stream.media.container._NUM_READS", 100)
    with pytest.raises(BadSampleError, match="more than 100 parts"):
        check_container(_box(b"ftyp", b"isom") + _box(b"free", b"") * 200, "decode")


@pytest.mark.parametrize("kind", ["EPS", "PCX", "TGA", "DDS", "SPIDER", "SGI", "MSP", "PDF"])
def test_images_of_other_formats_are_refused(kind):
    buffer = io.BytesIO()
    mode = {"SPIDER": "F", "MSP": "1"}.get(kind, "RGB")
    Image.new(mode, (32, 32)).save(buffer, kind)
    for use in (probe_image, decode_image):
        with pytest.raises(BadSampleError) as caught:
            use(buffer.getvalue())
        assert caught.value.reason == "bad_image"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_images_of_the_list_are_read(kind):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24)).save(buffer, kind)
    assert decode_image(buffer.getvalue()).size == (32, 24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_videos_have_limits(backend):
    _needs(backend)
    data = make_mp4(num_frames=16)  # 96x64
    everything = [*range(16)]
    assert len(decode_video(data, lambda _: everything, backend, MediaLimits(decoded_bytes=16 * 96 * 64 * 3)).frames)
    for limits, message in (
        (MediaLimits(video_pixels=96 * 64 - 1), r"96x64 pixels, more than the limit of 6,143.*video_pixels"),
        (MediaLimits(video_frames=15), r"16 frames, more than the limit of 15.*video_frames"),
        (MediaLimits(decoded_bytes=16 * 96 * 64 * 3 - 1), r"16 frames of 96x64 pixels take 294,912 bytes.*fps"),
    ):
        with pytest.raises(BadSampleError, match=message) as caught:
            decode_video(data, lambda _: everything, backend, limits)
        assert caught.value.reason == "video_too_large"
    with pytest.raises(BadSampleError, match="video_frames") as caught:
        probe_video(data, backend, MediaLimits(video_frames=15))
    assert caught.value.stage == "convert"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (VideoInfo(60, 4096, 4096, 30.0, 2.0), "video_pixels"),  # 53 KB on disk, if nothing moves
        (VideoInfo(300, 2160, 3840, 2.0, 150.0), "decoded_bytes"),
        (VideoInfo(768, 1080, 1920, 2.0, 384.0), None),
        (VideoInfo(32, 2880, 5120, 2.0, 16.0), None),
    ],
)
def test_the_default_limits_pass_what_people_train_on_and_no_more(info, reason):
    def check():
        DEFAULT_LIMITS.check_video("decode", info)
        DEFAULT_LIMITS.check_picked(info, info.frames)

    if reason is None:
        check()
        return
    with pytest.raises(BadSampleError, match=reason):
        check()


PEAK = """
import resource, sys
from vlm_stream.errors import BadSampleError
from vlm_stream.media import MediaLimits, decode_video
data, backend, most = open(sys.argv[1], "rb").read(), sys.argv[2], int(sys.argv[3])
decode_video(data, lambda _: [0], backend)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_video(data, lambda info: range(info.frames), backend, MediaLimits(decoded_bytes=most))
except BadSampleError as error:
    print(error.reason)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_more_memory_is_taken_than_the_limit_says(backend, tmp_path):
    _needs(backend)
    size = 80 * 640 * 1024 * 3
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_mp4(num_frames=80, height=640, width=1024))
    for most, refused in ((size, False), (size - 1, True)):
        command = [sys.executable, "-c", PEAK, str(path), backend, str(most)]
        *reason, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert reason == ["video_too_large"] * refused
        assert int(peak) < (64 << 20 if refused else most + (64 << 20))  # a second copy would be 157 MB


def test_lists_of_frames_and_images_have_limits():
    frames = [make_jpeg(20, 30, seed=seed) for seed in range(5)]
    with pytest.raises(BadSampleError, match="5 frames, more than the limit of 4"):
        decode_frame_list(frames, _first, 1.0, limits=MediaLimits(video_frames=4))
    for use in (lambda limits: probe_image(frames[0], limits), lambda limits: decode_image(frames[0], limits=limits)):
        with pytest.raises(BadSampleError, match=r"30x20 pixels, more than the limit of 599; .*image_pixels") as caught:
            use(MediaLimits(image_pixels=599))
        assert caught.value.reason == "image_too_large"


def _sound(kind: str, subtype: str | None = None) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(16_000) / 20), 16_000, format=kind, subtype=subtype)
    return buffer.getvalue()


def _tag(size: int) -> bytes:
    return b"ID3\x04\0\0" + bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0)) + bytes(size)


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "W64", "VOC", "PAF", "SVX", "NIST", "AVR", "HTK", "MAT5", "WVE"])
@pytest.mark.parametrize("is_tagged", [False, True])
def test_sounds_of_other_formats_are_refused(kind, is_tagged, tmp_path):
    subtypes = {"HTK": "PCM_16", "WVE": "ALAW", "AVR": "PCM_16", "NIST": "PCM_16", "VOC": "PCM_16", "SVX": "PCM_16"}
    data = _tag(300) * is_tagged + _sound(kind, subtypes.get(kind))
    (tmp_path / "a.wav").write_bytes(data)
    for each in (data, tmp_path / "a.wav"):
        for use in (probe_audio, lambda data: decode_audio(data, 16_000)):
            with pytest.raises(BadSampleError, match="are not WAV, FLAC, Ogg or MP3") as caught:
                use(each)
            assert caught.value.reason == "bad_audio"


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", None), ("WAVEX", None), ("RF64", None), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)],
)
def test_sounds_of_the_list_are_read(kind, subtype):
    data = _sound(kind, subtype)
    sounds = [data] if kind != "MP3" else [data, _tag(300) + data, _tag(5) + _tag(700) + data]
    for each in sounds:
        assert probe_audio(each).rate == 16_000
        assert len(decode_audio(each, 16_000)) >= 16_000


def test_audio_has_limits():
    data = make_wav(3.0)
    assert np.any(decode_audio(data, 16_000, MediaLimits(audio_seconds=3)))
    for limits, message in (
        (MediaLimits(audio_seconds=2), "lasts 3 seconds, more than the limit of 2"),
        (MediaLimits(decoded_bytes=1000), "bytes in memory, more than the limit of 1,000"),
    ):
        for use in (lambda limits: probe_audio(data, limits), lambda limits: decode_audio(data, 16_000, limits)):
            with pytest.raises(BadSampleError, match=message) as caught:
                use(limits)
            assert caught.value.reason == "audio_too_large"


def test_limits_are_numbers():
    with pytest.raises(ConfigError, match=r"media_limits\.video_frames is 0, but it must be a whole number"):
        MediaLimits(video_frames=0)
