"""Toy media are real files of the promised kind, and functions of their arguments alone."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest
from PIL import Image

from tests.odd_images import make_16bit_png, make_cmyk_jpeg, make_palette_gif, make_rotated_jpeg
from vlm_stream.errors import ConfigError
from vlm_stream.testing import (
    make_grey_jpeg,
    make_jpeg,
    make_mp4,
    make_palette_png,
    make_png_with_alpha,
    make_wav,
)
from vlm_stream.testing.toy_media import read_frame_number


@pytest.mark.parametrize(
    ("make", "kind", "mode"),
    [
        (make_jpeg, "JPEG", "RGB"),
        (make_grey_jpeg, "JPEG", "L"),
        (make_cmyk_jpeg, "JPEG", "CMYK"),
        (make_rotated_jpeg, "JPEG", "RGB"),
        (make_png_with_alpha, "PNG", "RGBA"),
        (make_palette_png, "PNG", "P"),
        (make_palette_gif, "GIF", "P"),
        (make_16bit_png, "PNG", "I;16"),
    ],
)
@pytest.mark.parametrize("size", [(37, 53), (1, 1), (1, 400)])
def test_images_have_the_promised_encoding_and_depend_on_the_seed_alone(make, kind, mode, size):
    content = make(*size, seed=3)
    image = Image.open(io.BytesIO(content))
    image.load()
    assert (image.format, image.mode, image.size) == (kind, mode, size[::-1])
    assert make(*size, seed=3) == content
    assert make(37, 53, seed=4) != make(37, 53, seed=3)


def test_jpeg_quality_changes_the_size_of_the_file():
    assert len(make_jpeg(200, 300, quality=20)) < len(make_jpeg(200, 300, quality=95))


def test_rotated_jpeg_tells_viewers_to_turn_it():
    assert Image.open(io.BytesIO(make_rotated_jpeg(40, 60, orientation=8))).getexif()[0x0112] == 8


def decode(content: bytes) -> tuple[list[int], list[float], object]:
    with av.open(io.BytesIO(content)) as container:
        frames = list(container.decode(video=0))
        numbers = [read_frame_number(frame.to_ndarray(format="rgb24")) for frame in frames]
        return numbers, [float(frame.time) for frame in frames], frames[0]


def test_every_frame_of_a_clip_carries_its_number():
    numbers, times, first = decode(make_mp4(num_frames=30, height=48, width=80, fps=12.5, gop=6))
    assert numbers == list(range(30))
    assert times == pytest.approx(np.arange(30) / 12.5)
    assert (first.height, first.width) == (48, 80)


def test_clips_depend_on_their_arguments_alone():
    options = {"num_frames": 12, "with_audio": True, "variable_rate": True, "seed": 5}
    clips = set()
    for _ in range(4):
        scratch = np.random.default_rng().integers(0, 255, 300_000)  # other memory under the encoder each time
        clips.add(make_mp4(**options))
        del scratch
    assert len(clips) == 1


def test_clip_with_audio_has_a_track_of_the_same_length():
    with av.open(io.BytesIO(make_mp4(num_frames=16, fps=8.0, with_audio=True))) as container:
        audio = container.streams.audio[0]
        assert float(audio.duration * audio.time_base) == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_clip_can_ask_to_be_turned(rotation):
    first = decode(make_mp4(num_frames=2, rotation=rotation))[2]
    assert first.rotation % 360 == -rotation % 360  # PyAV counts the other way round


def test_variable_frame_rate_has_two_gaps():
    times = decode(make_mp4(num_frames=8, fps=8.0, variable_rate=True))[1]
    assert {round(gap, 4) for gap in np.diff(times)} == {0.0625, 0.1875}


@pytest.mark.parametrize("sides", [{"height": 47}, {"width": 0}, {"num_frames": 0}])
def test_clip_that_h264_cannot_hold_is_refused(sides):
    with pytest.raises(ConfigError, match="cannot be encoded: h264 wants at least one frame and even sides"):
        make_mp4(**sides)


def test_clip_cannot_be_turned_by_any_angle():
    with pytest.raises(ConfigError, match="cannot be turned by 45 degrees: use 0, 90, 180 or 270"):
        make_mp4(rotation=45)


def test_wav_has_the_promised_length_rate_and_channels():
    with wave.open(io.BytesIO(make_wav(1.5, rate=8000, channels=2))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (12000, 8000, 2)
    assert make_wav(0.1, seed=1) == make_wav(0.1, seed=1) != make_wav(0.1, seed=2)
