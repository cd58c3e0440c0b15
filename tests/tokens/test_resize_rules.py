"""The resize rules: golden values, laws, and one implementation for numbers and arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.tokens import smart_resize_image, smart_resize_video
from vlm_stream.tokens.rules.grids import PixelBox, resize_clip

SIDES = st.integers(1, 20000)


@pytest.mark.parametrize(
    ("size", "resized", "tokens"),
    [
        ((1024, 768), (1036, 756), 999),
        ((280, 560), (280, 560), 200),
        ((10, 10), (56, 56), 4),
        ((4000, 4000), (980, 980), 1225),
        ((1, 10000), (28, 5600), 200),
        ((1080, 1920), (728, 1316), 1222),
        ((70, 98), (56, 112), 8),
        ((3000, 50), (2996, 56), 214),
    ],
)
def test_golden_images(size, resized, tokens):
    assert smart_resize_image(*size) == resized
    assert (resized[0] // 14) * (resized[1] // 14) // 4 == tokens


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((100, 100), 256),
        ((1024, 768), 768),
        ((1920, 1080), 2040),
        ((3840, 2160), 4080),
        ((4096, 4096), 4096),
        ((1, 10000), 1600),
    ],
)
def test_golden_images_of_factor_32(size, tokens):
    high, wide = smart_resize_image(*size, factor=32, min_pixels=262144, max_pixels=4194304)
    assert (high // 16) * (wide // 16) // 4 == tokens


@pytest.mark.parametrize(
    ("clip", "resized"),
    [
        ((16, 480, 640), (480, 640)),
        ((32, 1920, 1080), (832, 448)),
        ((768, 1080, 1920), (96, 160)),
        ((5, 100, 100), (96, 96)),
        ((4, 16, 16), (64, 64)),
    ],
)
def test_golden_videos(clip, resized):
    assert smart_resize_video(*clip) == resized


def test_small_sides_of_clips_are_scaled_up_first():
    high, wide = resize_clip(4, 5, 1000, 2, PixelBox(32, 131072, 786432))
    assert 4 // 2 * (high // 32) * (wide // 32) == 390


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=20))
def test_arrays_give_what_numbers_give(sizes):
    heights, widths = np.asarray(sizes).T
    high, wide = smart_resize_image(heights, widths)
    assert list(zip(high.tolist(), wide.tolist(), strict=True)) == [smart_resize_image(h, w) for h, w in sizes]


@given(st.integers(1, 500), SIDES, SIDES)
def test_arrays_of_clips_give_what_numbers_give(frames, height, width):
    arrays = [np.asarray([number]) for number in (frames, height, width)]
    assert tuple(int(side[0]) for side in smart_resize_video(*arrays)) == smart_resize_video(frames, height, width)
    box = PixelBox(32, 131072, 786432)
    assert tuple(int(side[0]) for side in resize_clip(*arrays, 2, box)) == resize_clip(frames, height, width, 2, box)


@given(st.integers(28, 4000), st.integers(28, 4000))
def test_areas_stay_inside_the_limits_and_sides_are_multiples(height, width):
    high, wide = smart_resize_image(height, width)
    assert high % 28 == wide % 28 == 0
    if max(height, width) <= 100 * min(height, width):
        assert 3136 <= high * wide <= 1003520


def test_a_column_with_an_empty_image_does_not_stop():
    high, wide = smart_resize_image(np.asarray([0, 280]), np.asarray([5, 560]))
    assert (high[1], wide[1]) == (280, 560)
