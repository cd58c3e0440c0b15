"""Seconds of a file: the frames and samples that are shown in them, and nothing else."""

from __future__ import annotations

import contextlib
import io
import itertools
import math

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.conversation import Seconds, named_span
from vlm_stream.errors import BadSampleError, ConfigError, MissingExtraError
from vlm_stream.media import decode_audio, decode_video, probe_audio, probe_video
from vlm_stream.media.backends import AvVideo, choose_backend
from vlm_stream.testing import make_mp4
from vlm_stream.testing.toy_media import read_frame_number

pytest.importorskip("av", reason="PyAV is not installed")
CLIP = make_mp4(num_frames=60, fps=10.0, gop=7)
VARIABLE = make_mp4(num_frames=40, variable_rate=True, gop=12)


def _item(**extras: object) -> dict[str, object]:
    return {"type": "video", "video": "a.mp4", **extras}


def _all(info):
    return range(info.frames)


@pytest.mark.parametrize(
    ("extras", "found"),
    [
        ({}, None),
        ({"start": None, "end": None}, None),
        ({"start": 1, "end": 2.5}, (1.0, 2.5)),
        ({"end": 2}, (0.0, 2.0)),
        ({"start": np.float32(0.5)}, (0.5, None)),
    ],
)
def test_an_item_names_seconds(extras, found):
    assert named_span(_item(**extras)) == found


@pytest.mark.parametrize(
    ("start", "end"),
    [(2, 2), (3, 2), (-1, 2), ("1", "2"), (math.nan, 2), (0, math.inf), (True, 2), ([1], 2), (10**400, None)],
)
def test_what_is_no_part_of_a_clip_is_refused(start, end):
    with pytest.raises(BadSampleError, match=r"no part of a clip; write seconds, 0 <= start < end") as caught:
        named_span(_item(start=start, end=end))
    assert caught.value.reason == "bad_span"


def test_frames_that_are_decoded_have_no_seconds():
    for video in (["a.jpg", "b.jpg"], np.zeros((2, 4, 4, 3), np.uint8)):
        with pytest.raises(BadSampleError, match=r"seconds of a file, and the item holds frames"):
            named_span({"type": "video", "video": video, "start": 1.0})


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 599), st.integers(2, 600), st.sampled_from(["auto", "av", "decord", "torchcodec"]))
def test_a_part_holds_the_frames_that_are_shown_in_it(begin, length, backend):
    try:
        choose_backend(backend)
    except (ConfigError, MissingExtraError):
        backend = "av"
    start, end = begin / 100, min(begin + length, 600) / 100
    expected = [frame for frame in range(60) if start - 1e-3 <= frame / 10 < end - 1e-3]
    if not expected:
        with pytest.raises(BadSampleError, match="no frame begins from"):
            probe_video(CLIP, backend, seconds=Seconds(start, end))
        return
    part = decode_video(CLIP, _all, backend, seconds=Seconds(start, end))
    assert [read_frame_number(frame) for frame in part.frames] == expected
    assert part.indices == tuple(range(len(expected)))
    assert part.info == probe_video(CLIP, backend, seconds=Seconds(start, end))
    rate = probe_video(CLIP, backend).fps
    assert (part.info.frames, part.info.fps) == (len(expected), rate)
    assert part.info.seconds == pytest.approx(len(expected) / rate)
    assert np.array_equal(part.frames, decode_video(CLIP, lambda _: expected, backend).frames)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_where_the_rate_varies_the_times_of_the_file_count(data):
    video = AvVideo(VARIABLE, "mov")
    times = video.times().tolist()
    video.close()
    assert len(set(np.round(np.diff(times), 6))) > 1
    start = data.draw(st.sampled_from(times[:-1]))
    end = data.draw(st.sampled_from([time for time in times if time > start]))
    part = decode_video(VARIABLE, _all, seconds=Seconds(start, end))
    assert [read_frame_number(frame) for frame in part.frames] == list(range(times.index(start), times.index(end)))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 599), min_size=1, max_size=5, unique=True))
def test_neighbouring_parts_share_no_frame_and_lose_none(cuts):
    ends = [0.0, *(cut / 100 for cut in sorted(cuts)), None]
    counts = 0
    for start, end in itertools.pairwise(ends):
        with contextlib.suppress(BadSampleError):  # too short for a frame
            counts += probe_video(CLIP, "av", seconds=Seconds(start, end)).frames
    assert counts == 60


@pytest.mark.parametrize("seconds", [Seconds(6.0, None), Seconds(6.5, 7.0), Seconds(3.0, 6.2), Seconds(1e300, None)])
def test_seconds_behind_the_end_are_refused(seconds):
    with pytest.raises(BadSampleError, match=r"is asked of a file of 6\.000 s; mend start and end") as caught:
        decode_video(CLIP, _all, "av", seconds=seconds)
    assert caught.value.reason == "bad_span"


def test_an_end_that_was_rounded_up_is_the_end():
    assert probe_video(CLIP, "av", seconds=Seconds(5.0, 6.05)).frames == 10


def test_a_decoder_that_counts_other_frames_is_not_trusted(monkeypatch):
    monkeypatch.setattr(AvVideo, "times", lambda _: np.arange(59) / 10)
    with pytest.raises(BadSampleError, match=r"counts 60 frames and the file has times for 59.*video_backend='av'"):
        probe_video(CLIP, "av", seconds=Seconds(0.0, 1.0))


@pytest.mark.parametrize(
    "kind", ["WAV PCM_16", "WAV FLOAT", "FLAC PCM_16", "OGG VORBIS", "OGG OPUS", "MP3 MPEG_LAYER_III"]
)
def test_a_part_of_a_sound_is_a_slice_of_it(kind):
    rate = 48000
    wave = (np.sin(np.arange(rate * 3) / 50) * 0.3).astype(np.float32)
    file = io.BytesIO()
    container, subtype = kind.split()
    soundfile.write(file, wave, rate, format=container, subtype=subtype)
    data = file.getvalue()
    whole = decode_audio(data, rate)
    for start, end in ((0.5, 2.25), (1.0, None), (2.0, 3.05)):
        seconds = Seconds(start, end)
        part = decode_audio(data, rate, seconds=seconds)
        assert np.array_equal(part, whole[round(start * rate) : None if end is None else round(end * rate)])
        assert probe_audio(data, seconds=seconds).samples == len(part)


@pytest.mark.parametrize("seconds", [Seconds(3.0, None), Seconds(1.0, 4.0)])
def test_sound_behind_the_end_is_refused(seconds):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(48000, np.float32), 16000, format="WAV")
    for use in (
        lambda data, part: probe_audio(data, seconds=part),
        lambda data, part: decode_audio(data, 16000, seconds=part),
    ):
        with pytest.raises(BadSampleError, match=r"is asked of a file of 3\.000 s"):
            use(file.getvalue(), seconds)
    with pytest.raises(BadSampleError, match=r"no sample of 16000 Hz lies from 1 s"):
        probe_audio(file.getvalue(), seconds=Seconds(1.0, 1.00001))
