"""The sound track of a video is a sound: counted by its packets, decoded to as many samples."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from vlm_stream.conversation import Seconds
from vlm_stream.convert import make_shards
from vlm_stream.errors import BadSampleError
from vlm_stream.format import IndexCache, OpenDataset
from vlm_stream.media import MediaLimits, decode_audio, probe_audio
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources
from vlm_stream.testing import build_processor, make_mp4
from vlm_stream.world import World

TRACKS = {
    "aac.mp4": "-c:v libx264 -c:a aac",
    "fragments.mp4": "-c:v libx264 -c:a aac -movflags frag_keyframe+empty_moov",
    "opus.mkv": "-c:v libx264 -c:a libopus",
    "vorbis.webm": "-c:v libvpx -c:a libvorbis",
    "aac.ts": "-c:v libx264 -c:a aac",
    "mp3.avi": "-c:v mpeg4 -c:a mp3",
    "alone.m4a": "-vn -c:a aac",
}


@functools.cache
def track(name: str) -> bytes:
    """Return a clip of 3 s with a tone of 440 Hz in both channels."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    inputs = "-f lavfi -i testsrc2=size=96x64:rate=25:duration=3 -f lavfi -i sine=frequency=440:duration=3"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        made = subprocess.run(
            f"ffmpeg -v error -nostdin {inputs} -ac 2 {TRACKS[name]} {path}".split(), capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"this ffmpeg cannot write it: {made.stderr.decode()[-200:]}")
        return path.read_bytes()


@pytest.mark.parametrize("name", TRACKS)
def test_a_track_has_the_samples_that_are_counted(name):
    data = track(name)
    info = probe_audio(data)
    assert info.samples / info.rate == pytest.approx(3.0, abs=0.1)
    wave = decode_audio(data, info.rate)
    assert (len(wave), wave.dtype) == (info.samples, np.float32)
    middle = wave[info.rate // 2 : info.rate * 5 // 2]
    assert np.argmax(np.abs(np.fft.rfft(middle))) / 2 == pytest.approx(440, abs=1)
    for start, end in ((0.5, 1.25), (1.0, None), (2.0, 3.05)):
        part = decode_audio(data, info.rate, seconds=Seconds(start, end))
        stop = None if end is None else min(round(end * info.rate), info.samples)
        assert np.array_equal(part, wave[round(start * info.rate) : stop])
        assert probe_audio(data, seconds=Seconds(start, end)).samples == len(part)


def test_a_path_is_read_too(tmp_path):
    (tmp_path / "a.mp4").write_bytes(track("aac.mp4"))
    info = probe_audio(tmp_path / "a.mp4")
    assert info == probe_audio(track("aac.mp4"))
    assert np.array_equal(decode_audio(str(tmp_path / "a.mp4"), 16_000), decode_audio(track("aac.mp4"), 16_000))


def test_a_video_without_sound_is_a_bad_sample():
    for use in (probe_audio, lambda data: decode_audio(data, 16_000)):
        with pytest.raises(BadSampleError, match="the file has no sound track") as caught:
            use(make_mp4(num_frames=4))
        assert caught.value.reason == "bad_audio"


def test_a_damaged_or_long_track_is_a_bad_sample():
    data = track("aac.mp4")
    with pytest.raises(BadSampleError):
        decode_audio(data[: len(data) // 3], 16_000)
    for use in (probe_audio, lambda data, limits: decode_audio(data, 16_000, limits)):
        with pytest.raises(BadSampleError, match="lasts 3 seconds, more than the limit of 1"):
            use(data, MediaLimits(audio_seconds=1))


@pytest.mark.parametrize("extras", [{}, {"start": 0.5, "end": 2.5}])
def test_a_video_and_its_sound_are_counted_and_encoded(tmp_path, extras):
    (tmp_path / "a.mp4").write_bytes(track("aac.mp4"))
    shown = [{"type": kind, kind: "a.mp4", **extras} for kind in ("video", "audio")]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A tone."}]}
    lines = [
        {"id": own_id, "messages": [{"role": "user", "content": [*items, {"type": "text", "text": "What?"}]}, answer]}
        for own_id, items in {"both": shown, "turned": shown[::-1], "sound": shown[1:]}.items()
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    processor = build_processor("qwen2_5_omni")
    make_shards(tmp_path / "records.jsonl", tmp_path / "out", media_dir=str(tmp_path), workers=1, processor=processor)
    (index,) = OpenDataset(str(tmp_path / "out"), None, IndexCache()).indexes()
    info = probe_audio(track("aac.mp4"), seconds=Seconds(0.5, 2.5) if extras else None)
    assert {index.sizes(row).audios[0].samples for row in range(3)} == {info.samples}
    options = StreamOptions(mode="plain", batch_size=1, max_frames=4)
    plan = open_plan(normalise_sources(str(tmp_path / "out")), options, processor)
    with plan.build.open() as builder:
        found = [builder.build(planned.blueprint) for planned in plan.blueprints(World(0, 1))]
    assert not [bad for each in found for bad in each.bad]
    assert [each.num_tokens for each in found] == [each.num_planned_tokens for each in found]
    assert all("input_features" in each.batch for each in found)
