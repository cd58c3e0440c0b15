"""Estimates from the metadata of in-memory samples: golden values, and what used to fail."""

from __future__ import annotations

import pytest

from vlm_stream.collate.estimate import (
    estimate_image_tokens,
    estimate_sample_length,
    estimate_video_tokens,
    extract_image_config,
    extract_video_config,
)
from vlm_stream.testing import build_processor

IMAGE = {"patch_size": 14, "merge_size": 2, "factor": 28, "min_pixels": 3136, "max_pixels": 1003520}
VIDEO = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "factor": 32,
    "min_pixels": 16384,
    "max_pixels": 12582912,
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 768,
}


def make_example(text="eleven char", images=0, videos=0, **more):
    content = [{"type": "image", "image": "a"}] * images + [{"type": "video", "video": "b"}] * videos
    return {"conversation": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}], **more}


@pytest.mark.parametrize(
    ("meta", "tokens"),
    [
        ([100, 320, 640, 25, 4], 800),
        ([2, 320, 320, 30, 0.067], 200),
        ([3000, 320, 320, 30, 100], 4900),
        ([0, 320, 320, 0, 5], 200),
        ([0, 320, 320, 30, 5], 500),
        ([900, 1080, 1920, 30, 30], 5700),
        ([101, 480, 640, 24, 4.2], 1200),
        ([75, 240, 320, 29.97, 2.5], 240),
    ],
)
def test_golden_videos(meta, tokens):
    assert estimate_video_tokens(meta, VIDEO) == tokens
    keys = ("total_frames", "height", "width", "fps", "duration")
    assert estimate_video_tokens(dict(zip(keys, meta, strict=True)), VIDEO) == tokens


def test_rates_of_none_read_as_not_known():
    assert estimate_video_tokens([0, 320, 320, None, 5], VIDEO) == 200
    assert estimate_video_tokens([100, 320, 640, 25, 4], {**VIDEO, "fps": None}) == 800
    assert estimate_video_tokens([0, 320, 320, None, None], VIDEO) == 200


@pytest.mark.parametrize(
    ("meta", "tokens"),
    [([280, 560], 200), ({"height": 280, "width": 560}, 200), ({"n_tokens": 77}, 77), ({"path": "x"}, 500)],
)
def test_images_as_lists_and_dicts(meta, tokens):
    assert estimate_image_tokens(meta, IMAGE) == tokens


@pytest.mark.parametrize(("meta", "tokens"), [({"n_tokens": 12}, 12), ({"path": "x"}, 500)])
def test_videos_as_dicts(meta, tokens):
    assert estimate_video_tokens(meta, VIDEO) == tokens


def test_text_is_given_or_a_third_of_the_characters():
    assert estimate_sample_length(make_example()) == 3
    assert estimate_sample_length(make_example(_text_tokens=40)) == 40
    assert estimate_sample_length({"conversation": [{"role": "user", "content": "eleven char"}]}) == 3


def test_media_without_metadata_are_500_each():
    assert estimate_sample_length(make_example(images=2)) == 1003
    assert estimate_sample_length(make_example(images=1, videos=1), IMAGE, VIDEO, return_media_tokens=True) == (
        1003,
        1000,
    )


def test_media_with_metadata_are_counted():
    meta = {"images_meta": [[280, 560], None], "videos_meta": [[100, 320, 640, 25, 4]]}
    example = make_example(images=2, videos=1, mm_inputs_meta=meta)
    assert estimate_sample_length(example, IMAGE, VIDEO, return_media_tokens=True) == (1003, 1000)
    assert estimate_sample_length(example) == 1503


def test_metadata_without_entries_or_config_never_counts_as_nothing():
    example = make_example(images=1, videos=1, mm_inputs_meta={"images_meta": [[280, 560]], "videos_meta": []})
    assert estimate_sample_length(example, IMAGE, VIDEO, return_media_tokens=True)[1] == 700
    assert estimate_sample_length(example, IMAGE, None, return_media_tokens=True)[1] == 700


class Part:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("part", "limits"),
    [
        (Part(min_pixels=5, max_pixels=6, size={"min_pixels": 7, "max_pixels": 8}), (5, 6)),
        (Part(size={"min_pixels": 7, "max_pixels": 8, "shortest_edge": 1}), (7, 8)),
        (Part(size={"shortest_edge": 9, "longest_edge": 10}), (9, 10)),
        (Part(size=None), (3136, 1003520)),
        (Part(), (3136, 1003520)),
    ],
)
def test_limits_come_from_attributes_then_size_then_defaults(part, limits):
    config = extract_image_config(Part(image_processor=part))
    assert (config["min_pixels"], config["max_pixels"]) == limits


def test_configs_of_a_real_processor():
    processor = build_processor("qwen2_5_vl")
    assert extract_image_config(processor) == IMAGE
    config = extract_video_config(processor)
    assert (config["fps"], config["min_frames"], config["max_pixels"]) == (2.0, 4, 602112)
    assert extract_image_config(Part()) is extract_video_config(Part()) is None
