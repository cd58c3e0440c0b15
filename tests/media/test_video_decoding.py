"""Every backend gives the same frames; only the picked ones leave."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from vlm_stream.errors import BadSampleError, ConfigError, MissingExtraError
from vlm_stream.media import VideoInfo, decode_frame_list, decode_video, probe_video
from vlm_stream.media.backends import choose_backend
from vlm_stream.testing import make_jpeg, make_mp4, make_wav
from vlm_stream.testing.toy_media import read_frame_number

CLIPS = {
    "gop30_odd": {"num_frames": 91, "gop": 30},
    "gop250": {"num_frames": 255, "gop": 250},
    "short_odd": {"num_frames": 7},
    "one_frame": {"num_frames": 1},
    "turned_90": {"num_frames": 31, "rotation": 90, "gop": 10},
    "turned_180": {"num_frames": 31, "rotation": 180},
    "turned_270": {"num_frames": 31, "rotation": 270},
    "with_audio": {"num_frames": 25, "with_audio": True},
    "variable_rate": {"num_frames": 40, "variable_rate": True, "gop": 12},
}
BACKENDS = ["decord", "av", "torchcodec"]


def _needs(backend):
    try:
        choose_backend(backend)
    except ConfigError as error:  # installed, but its system libraries are not
        pytest.skip(str(error))
    except MissingExtraError:
        pytest.skip(f"the video backend {backend} is not installed")


def test_a_torchcodec_that_cannot_be_loaded_is_refused_at_once(monkeypatch):
    _needs("torchcodec")
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)  # what an import that fails leaves
    with pytest.raises(ConfigError, match=r"cannot be loaded.*FFmpeg's shared libraries.*or use 'av' or 'decord'"):
        choose_backend("torchcodec")


def _spread(info: VideoInfo) -> list[int]:
    return [int(i) for i in np.rint(np.linspace(0, info.frames - 1, 8))]


@pytest.fixture(scope="module", params=CLIPS, ids=str)
def clip(request):
    return CLIPS[request.param], make_mp4(**CLIPS[request.param])


@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_are_the_picked_ones_and_equal_in_every_backend(clip, backend):
    _needs(backend)
    spec, data = clip
    video = decode_video(data, _spread, backend)
    turns = spec.get("rotation", 0) // 90
    sides = (64, 96) if turns % 2 == 0 else (96, 64)
    assert (video.info.frames, video.info.height, video.info.width) == (spec["num_frames"], *sides)
    assert video.info == probe_video(data, backend)
    assert video.info.seconds == pytest.approx(spec["num_frames"] / video.info.fps)
    assert video.frames.dtype == np.uint8
    upright = [np.rot90(frame, turns) for frame in video.frames]  # the clip is shown clockwise by that many quarters
    assert [read_frame_number(frame) for frame in upright] == list(video.indices) == _spread(video.info)
    assert np.array_equal(video.frames, decode_video(data, _spread, "av").frames)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("indices", [[5], [6, 2, 2, 6], [0, 0], [15, 14, 13]])
def test_order_and_repetition_are_kept(backend, indices):
    _needs(backend)
    data = make_mp4(num_frames=16, gop=4)
    video = decode_video(memoryview(data), lambda _: indices, backend)
    assert [read_frame_number(frame) for frame in video.frames] == indices
    assert video.indices == tuple(indices)


def test_path_is_read_too(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(make_mp4(num_frames=3))
    assert probe_video(path).frames == probe_video(str(path), "av").frames == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "sound"])
def test_damaged_video_is_a_bad_sample(backend, damage):
    _needs(backend)
    whole = make_mp4(num_frames=16)
    data = {"truncated": whole[: len(whole) // 3], "text": b"not a video" * 50, "empty": b"", "sound": make_wav(0.2)}
    what, reason = "no video file of a kind", "unknown_container"
    if damage == "truncated":
        what, reason = f"cannot be decoded by {backend}", "bad_video"
    with pytest.raises(BadSampleError, match=what) as caught:
        decode_video(data[damage], _spread, backend)
    assert (caught.value.stage, caught.value.reason) == ("decode", reason)
    with pytest.raises(BadSampleError) as caught:
        probe_video(data[damage], backend)
    assert caught.value.stage == "convert"


def test_index_outside_is_a_bad_sample():
    with pytest.raises(BadSampleError, match=r"Frames 0\.\.16 were asked of a video with 16") as caught:
        decode_video(make_mp4(num_frames=16), lambda _: [0, 16])
    assert caught.value.reason == "frame_index"


def test_rule_that_picks_nothing_is_a_config_error():
    with pytest.raises(ConfigError, match="picked no frame of a video with 4"):
        decode_video(make_mp4(num_frames=4), lambda _: [])


def test_backend_names():
    assert choose_backend("auto") == "av"
    assert choose_backend("av") == "av"
    with pytest.raises(ConfigError, match="no video backend 'opencv'"):
        choose_backend("opencv")


def test_missing_backend_says_which_extra(monkeypatch):
    monkeypatch.setattr("vlm_stream.media.backends.find_spec", lambda name: None)
    assert choose_backend("auto") == "av"
    with pytest.raises(ConfigError, match="decord has no release for this machine"):
        choose_backend("decord")
    with pytest.raises(MissingExtraError, match="torchcodec"):
        choose_backend("torchcodec")


def test_frame_list_is_a_video_of_its_fps():
    frames = [make_jpeg(20, 30, seed=i) for i in range(5)]
    video = decode_frame_list(frames, lambda info: [*range(info.frames), info.frames - 1], 2.0)
    assert video.info == VideoInfo(frames=5, height=20, width=30, fps=2.0, seconds=2.5)
    assert video.frames.shape == (6, 20, 30, 3)
    assert np.array_equal(video.frames[4], video.frames[5])


def test_frame_list_errors():
    frame = make_jpeg(20, 30)
    with pytest.raises(BadSampleError, match="fps is required"):
        decode_frame_list([frame], lambda _: [0], None)
    with pytest.raises(BadSampleError, match="empty list of frames"):
        decode_frame_list([], lambda _: [0], 1.0)
    with pytest.raises(BadSampleError, match="differ in size"):
        decode_frame_list([frame, make_jpeg(20, 32)], lambda _: [0, 1], 1.0)
