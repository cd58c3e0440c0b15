"""Every rule against the size arithmetic of the installed transformers, over thousands of odd sizes, without pixels."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm_stream.testing import build_processor
from vlm_stream.tokens import Geometry, ImageSize, MediaSizes, TextCounter, count_tokens, make_columns


def draw_sizes(number: int = 3000, *, longest: int = 9000, max_ratio: float = 1e9, seed: int = 0) -> np.ndarray:
    """Sizes from specks to posters, exact multiples and squares among them: [number, 2]."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0, math.log(longest), (number, 2))).astype(np.int64)
    sizes[: number // 8] = sizes[: number // 8] // 28 * 28 + 14  # ties of rounding
    sizes[number // 8 : number // 4, 1] = sizes[number // 8 : number // 4, 0]  # squares
    sizes = np.maximum(sizes, 1)
    ratio = sizes.max(axis=1) / sizes.min(axis=1)
    return sizes[ratio <= max_ratio]


def count_images(geometry: Geometry, sizes: np.ndarray, siblings: int = 1):
    return geometry.image.count_images(sizes[:, 0], sizes[:, 1], np.full(len(sizes), siblings))


@pytest.mark.parametrize("limits", [(3136, 1003520), (200704, 401408), (784, 12845056)])
def test_qwen2_images(limits):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    processor = build_processor("qwen2_vl", image={"size": {"shortest_edge": limits[0], "longest_edge": limits[1]}})
    geometry = Geometry.from_processor(processor)
    sizes = draw_sizes(max_ratio=200)
    expected = [np.prod(smart_resize(int(h), int(w), 28, *limits)) // 784 for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected


@pytest.mark.parametrize(
    "video", [{}, {"cap_pixels_per_frame": True}, {"cap_pixels_per_frame": True, "max_video_tokens": 9000}]
)
def test_qwen2_videos_are_limited_frame_by_frame(video):
    processor = build_processor("qwen2_5_vl", video=video)
    rule = Geometry.from_processor(processor).video
    sizes = draw_sizes(400, max_ratio=200)
    frames = np.random.default_rng(1).integers(1, 400, len(sizes)) * 2
    counts = rule.count_videos(frames, sizes[:, 0], sizes[:, 1])
    resize = processor.video_processor.resize
    for n, (h, w), tokens in zip(frames, sizes, counts.tokens, strict=True):
        clip = torch.zeros(1).expand(1, int(n), 3, int(h), int(w))
        seen = capture_size(resize, clip, processor.video_processor, video)
        assert tokens == n // 2 * (seen[0] // 28) * (seen[1] // 28)


def capture_size(resize, clip, part, options):
    """Ask the processor's own resize for the target size, without its pixels."""
    from transformers.video_processing_utils import BaseVideoProcessor

    seen = {}

    def remember(self, image, size, **_):
        seen["size"] = (size.height, size.width)

    original = BaseVideoProcessor.resize
    BaseVideoProcessor.resize = remember
    try:
        resize(
            clip,
            size=part.size if hasattr(part.size, "shortest_edge") else _as_size(part.size),
            resample=None,
            factor=part.patch_size * part.merge_size,
            temporal_factor=part.temporal_patch_size,
            **({"cap_pixels_per_frame": True} if options.get("cap_pixels_per_frame") else {}),
        )
    finally:
        BaseVideoProcessor.resize = original
    return seen["size"]


def _as_size(size):
    from transformers.image_utils import SizeDict

    return SizeDict(**size)


@pytest.mark.parametrize(
    ("family", "video"), [("qwen3_vl", {}), ("qwen3_vl", {"cap_pixels_per_frame": True}), ("glm46v", {})]
)
def test_clips_are_limited_as_a_whole(family, video):
    processor = build_processor(family, video=video)
    part, rule = processor.video_processor, Geometry.from_processor(processor).video
    sizes = draw_sizes(400)
    sizes = sizes[[rule.find_problem(int(h), int(w)) is None for h, w in sizes]]
    frames = np.random.default_rng(1).integers(1, 200, len(sizes)) * 2
    counts = rule.count_videos(frames, sizes[:, 0], sizes[:, 1])
    factor = part.patch_size * part.merge_size
    for n, (h, w), tokens in zip(frames, sizes, counts.tokens, strict=True):
        clip = torch.zeros(1).expand(1, int(n), 3, int(h), int(w))
        high, wide = capture_size(part.resize, clip, part, video)
        assert tokens == n // 2 * (high // factor) * (wide // factor)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm46v"])
@pytest.mark.parametrize("medium", ["image", "video"])
def test_shapes_are_refused_exactly_where_the_processor_refuses_them(family, medium):
    processor = build_processor(family)
    rule = getattr(Geometry.from_processor(processor), medium)
    for height, width in [
        (1, 200),
        (1, 201),
        (200, 1),
        (201, 1),
        (2, 401),
        (30, 6000),
        (30, 6001),
        (5, 1000),
        (9, 1900),
    ]:
        refused = False
        try:
            if medium == "image":
                count = processor.image_processor.get_number_of_image_patches
                count(height, width, {})
            else:
                clip = torch.zeros(1).expand(1, 2, 3, height, width)
                capture_size(processor.video_processor.resize, clip, processor.video_processor, {})
        except ValueError:
            refused = True
        assert (rule.find_problem(height, width) is not None) == refused, (height, width)


def test_glm_images():
    processor = build_processor("glm46v")
    geometry = Geometry.from_processor(processor)
    sizes = draw_sizes(1500, max_ratio=180)
    expected = [processor.image_processor.get_number_of_image_patches(int(h), int(w), {}) // 4 for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected


def test_kimi_images_and_videos():
    processor = build_processor("kimi_k25")
    geometry = Geometry.from_processor(processor)
    sizes = draw_sizes()
    expected = [processor.image_processor.get_number_of_image_patches(int(h), int(w)) // 4 for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected
    per_frame = [processor.video_processor.get_num_of_video_patches(1, int(h), int(w)) // 4 for h, w in sizes]
    clips = geometry.video.count_videos(np.full(len(sizes), 9), sizes[:, 0], sizes[:, 1])
    assert clips.tokens.tolist() == [3 * tokens for tokens in per_frame]


@pytest.mark.parametrize("budget", [70, 280, 1120])
def test_gemma4_images(budget):
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    geometry = Geometry.from_processor(build_processor("gemma4", image={"max_soft_tokens": budget}))
    sizes = draw_sizes()
    expected = [np.prod(get_aspect_ratio_preserving_size(int(h), int(w), 16, budget * 9, 3)) // 48**2 for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected


@pytest.mark.parametrize("limits", [(1, 12), (2, 6), (1, 1)])
def test_internvl_tiles(limits):
    options = {"min_patches": limits[0], "max_patches": limits[1]}
    processor = build_processor("internvl", image={"crop_to_patches": True, **options})
    sizes = draw_sizes()
    expected = [256 * processor.image_processor.get_number_of_image_patches(int(h), int(w)) for h, w in sizes]
    assert count_images(Geometry.from_processor(processor), sizes).tokens.tolist() == expected


def test_llava_onevision_alone_and_in_company():
    processor = build_processor("llava_onevision")
    geometry = Geometry.from_processor(processor)
    sizes = draw_sizes()
    expected = [processor._get_number_of_features(int(h), int(w), 384, 384) for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected
    assert set(count_images(geometry, sizes, siblings=2).tokens.tolist()) == {730}


@pytest.mark.parametrize(
    "options",
    [
        {"size": {"longest_edge": 200}, "max_image_size": {"longest_edge": 50}},
        {"size": {"longest_edge": 182}, "max_image_size": {"longest_edge": 52}},
        {"do_image_splitting": False, "max_image_size": {"longest_edge": 50}, "size": {"longest_edge": 200}},
    ],
)
def test_smolvlm_rows_and_columns(options):
    """Its own helper for counting repeats a line wrongly; the rule follows what happens to pixels."""
    processor = build_processor("smolvlm", image=options)
    part, rule = processor.image_processor, Geometry.from_processor(processor).image
    sizes = np.maximum(draw_sizes(90, longest=600), 4)
    rows, columns = rule.count_rows_and_columns(sizes[:, 0], sizes[:, 1])
    for (h, w), row, column in zip(sizes, rows, columns, strict=True):
        image = Image.new("RGB", (int(w), int(h)))
        seen = part(images=[image], return_row_col_info=True)
        assert (seen["rows"][0][0], seen["cols"][0][0]) == (row, column), (h, w)


def test_phi4_tiles_without_their_padding():
    processor = build_processor("phi4_multimodal")
    part, rule = processor.image_processor, Geometry.from_processor(processor).image
    sizes = draw_sizes(600, longest=1800)
    keep = np.asarray([rule.find_problem(int(h), int(w)) is None for h, w in sizes])
    for h, w in sizes[~keep][:20]:
        with pytest.raises(ValueError, match="aspect ratio is very extreme"):
            mask_of(part, int(h), int(w))
    sizes = np.concatenate([sizes[keep][:60], [[448, 448], [449, 448], [4000, 3000], [6000, 700]]])
    for (h, w), tokens in zip(sizes, count_images(Geometry.from_processor(processor), sizes).tokens, strict=True):
        mask = mask_of(part, int(h), int(w))
        kept = mask[(np.arange(mask.shape[0]) % 32) % 2 == 0][:, (np.arange(mask.shape[1]) % 32) % 2 == 0]
        assert tokens == 256 + 1 + kept.sum() + kept[:, 0].sum() + 16, (h, w)


def mask_of(part, height: int, width: int) -> np.ndarray:
    image = torch.zeros(1, dtype=torch.uint8).expand(3, height, width)
    return part.dynamic_preprocess(image, 448, 14, 32, max_num=36)[1].numpy()


@pytest.mark.parametrize("options", [{}, {"max_num_patches": 4096, "min_num_patches": 256}, {"max_model_len": 600}])
def test_nemotron_images(options):
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import get_patch_grid_size

    processor = build_processor("nemotron_h_omni", image=options)
    part, geometry = processor.image_processor, Geometry.from_processor(processor)
    sizes = draw_sizes(max_ratio=100)
    most = max(min(max((part.max_model_len - 4) * 4, part.min_num_patches), part.max_num_patches), part.min_num_patches)
    expected = [np.prod(get_patch_grid_size(int(h), int(w), 16, 2, part.min_num_patches, most)) // 4 for h, w in sizes]
    assert count_images(geometry, sizes).tokens.tolist() == expected


@pytest.mark.parametrize("options", [{}, {"video_maintain_aspect_ratio": False}, {"video_target_num_patches": 300}])
def test_nemotron_videos(options):
    defaults = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    processor = build_processor("nemotron_h_omni", video={**defaults, **options})
    sizes = draw_sizes()
    expected = [3 * (np.prod(processor.video_processor._compute_target_patches(int(h), int(w))) // 4) for h, w in sizes]
    clips = Geometry.from_processor(processor).video.count_videos(np.full(len(sizes), 5), sizes[:, 0], sizes[:, 1])
    assert clips.tokens.tolist() == expected


def encoded_length(processor, texts, sizes):
    """Return how many ids the processor gives for texts with images between them."""
    token = processor.image_token
    text = token.join(texts)
    images = [Image.new("RGB", (width, height)) for height, width in sizes]
    return text, len(processor(text=[text], images=[images])["input_ids"][0])


SIDES = st.one_of(st.integers(1, 1600), st.sampled_from([336, 337, 364, 672, 1008, 1344]))
SIZES = st.lists(st.tuples(SIDES, SIDES).filter(lambda s: max(s) <= 100 * min(s)), min_size=1, max_size=3)


@pytest.mark.parametrize("family", ["idefics3", "llama4", "llava_next", "paligemma"])
@given(sizes=SIZES, words=st.text("a \n.", max_size=3))
@settings(max_examples=40, deadline=None)
def test_lengths_are_those_of_the_processor(family, sizes, words):
    processor = _processor(family)
    if family == "idefics3":  # crops of 91 pixels, that large ones are not drawn
        sizes = [(max(height // 4, 1), max(width // 4, 1)) for height, width in sizes]
    counter = TextCounter(processor)
    assert not counter.geometry.is_measured
    text, length = encoded_length(processor, ["a", *[words] * len(sizes)], sizes)
    media = MediaSizes(images=tuple(ImageSize(height=height, width=width) for height, width in sizes))
    ids, surplus = counter.encode(text, media)
    assert surplus == 0
    columns = make_columns([media], [len(ids)])
    assert count_tokens(columns, counter.geometry).tokens.tolist() == [length]


@cache
def _processor(family):
    options = {"size": {"longest_edge": 364}, "max_image_size": {"longest_edge": 91}} if family == "idefics3" else {}
    return build_processor(family, image=options)


@pytest.mark.parametrize("options", [{}, {"resize_to_max_canvas": True}, {"max_patches": 5}])
def test_llama4_canvases(options):
    from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit

    processor = build_processor("llama4", image=options)
    part, rule = processor.image_processor, Geometry.from_processor(processor).image
    size = SimpleNamespace(height=336, width=336)
    canvases = torch.tensor(find_supported_resolutions.__wrapped__(part.max_patches, size))
    sizes = draw_sizes()
    expected = [(get_best_fit((int(h), int(w)), canvases, part.resize_to_max_canvas) // 336).tolist() for h, w in sizes]
    assert np.stack(rule.count_rows_and_columns(sizes[:, 0], sizes[:, 1]), axis=1).tolist() == expected


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava_next_cuts_all_images(strategy):
    processor = build_processor("llava_next")
    processor.vision_feature_select_strategy = strategy
    geometry = Geometry.from_processor(processor)
    tile = processor.image_processor.crop_size["height"]
    sizes = draw_sizes()
    dropped = int(strategy == "default")
    expected = [processor._get_number_of_features(int(h), int(w), tile, tile) - dropped for h, w in sizes]
    for siblings in (1, 3):
        assert count_images(geometry, sizes, siblings).tokens.tolist() == expected


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("idefics3", "do_resize", False),
        ("idefics3", "size", {"longest_edge": 4096}),
        ("llava_next", "do_center_crop", False),
        ("llava_next", "crop_size", {"height": 224, "width": 336}),
    ],
)
def test_settings_that_a_rule_does_not_know_are_measured(family, setting, value, caplog):
    processor = build_processor(family)
    setattr(processor.image_processor, setting, value)
    geometry = Geometry.from_processor(processor)
    assert geometry.image is None or geometry.is_measured or not geometry.is_exact
    assert "has another config than its family" in caplog.text
