"""One rule for counting and for picking frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.tokens import FrameRule, count_frames, frame_indices, make_video_metadata

RULES = st.builds(
    FrameRule,
    fps=st.none() | st.floats(0.05, 60),
    min_frames=st.integers(1, 8),
    max_frames=st.none() | st.integers(1, 64),
    temporal_patch_size=st.integers(1, 4),
)


@given(st.integers(1, 5000), st.floats(0, 240), RULES)
def test_as_many_frames_are_picked_as_are_counted(total, fps, rule):
    indices = frame_indices(total, fps, rule)
    assert len(indices) == count_frames(total, fps, rule)
    assert len(indices) % rule.temporal_patch_size == 0
    assert indices[0] == 0
    assert indices[-1] < total
    assert (np.diff(indices) >= 0).all()
    fresh = np.unique(indices)
    assert len(indices) - len(fresh) < rule.temporal_patch_size  # only the filling of the last patch repeats


@given(st.integers(1, 300), st.lists(st.integers(-5, 400), min_size=1, max_size=9), RULES)
def test_named_frames_are_kept_and_filled_up(total, picked, rule):
    indices = frame_indices(total, 25.0, rule, picked)
    assert len(indices) == count_frames(total, 25.0, rule, picked=len(picked))
    assert indices[: len(picked)].tolist() == [min(max(index, 0), total - 1) for index in picked]
    assert set(indices[len(picked) :]) <= {indices[len(picked) - 1]}


@pytest.mark.parametrize(
    ("total", "fps", "rule", "expected"),
    [
        (120, 30.0, FrameRule(fps=2.0), 8),
        (120, 30.0, FrameRule(fps=30.0, max_frames=8), 8),
        (100, 20.0, FrameRule(fps=1.0, min_frames=5, temporal_patch_size=4), 8),
        (2, 30.0, FrameRule(), 2),
        (3, 30.0, FrameRule(), 4),
        (1, 30.0, FrameRule(), 2),
        (50, 0.0, FrameRule(), 50),
        (5000, 0.0, FrameRule(max_frames=768), 768),
        (50, 25.0, FrameRule(fps=None), 50),
    ],
)
def test_counts(total, fps, rule, expected):
    assert count_frames(total, fps, rule) == expected


def test_short_clips_give_each_frame_once_and_repeat_the_last():
    assert frame_indices(3, 30.0, FrameRule()).tolist() == [0, 1, 2, 2]
    assert frame_indices(1, 30.0, FrameRule(temporal_patch_size=4)).tolist() == [0, 0, 0, 0]


def test_frames_are_spread_evenly_with_both_ends():
    assert frame_indices(100, 25.0, FrameRule(fps=1.0)).tolist() == [0, 33, 66, 99]


def test_a_file_that_does_not_say_its_frames_is_counted_by_its_duration():
    rule = FrameRule(fps=2.0)
    assert count_frames(0, 30.0, rule, seconds=5.0) == count_frames(150, 30.0, rule)
    assert count_frames(0, 0.0, rule, seconds=5.0) == 10
    assert count_frames(0, 0.0, rule) == 4


@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(0, 60), st.floats(0, 90), st.integers(0, 9)), min_size=1), RULES
)
def test_arrays_give_what_numbers_give(clips, rule):
    total, fps, seconds, picked = (np.asarray(column) for column in zip(*clips, strict=True))
    counts = count_frames(total, fps, rule, seconds=seconds, picked=picked)
    single = [count_frames(t, f, rule, seconds=s, picked=p) for t, f, s, p in clips]
    assert counts.tolist() == single


def test_metadata_assumes_a_rate_where_there_is_none():
    assert make_video_metadata(48, 0.0, 0.0, [0, 47]) == {
        "total_num_frames": 48,
        "fps": 24.0,
        "duration": 2.0,
        "frames_indices": [0, 47],
    }


def test_empty_clip_is_a_bad_sample():
    with pytest.raises(BadSampleError, match="has no frame, so nothing can be sampled") as caught:
        frame_indices(0, 25.0, FrameRule())
    assert (caught.value.stage, caught.value.reason) == ("decode", "no_frames")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 0.0}, "A rate of 0.0 frames per second picks nothing"),
        ({"min_frames": 0}, "min_frames=0 and temporal_patch_size=2 must be at least 1"),
        ({"max_frames": 0}, "max_frames=0 leaves no frame of any clip"),
    ],
)
def test_rules_that_pick_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        FrameRule(**options)
