"""The promise of this room: counted length == len(input_ids) of the real processor, for every family."""

from __future__ import annotations

import tempfile
from functools import cache

import numpy as np
import pytest
from transformers import AutoProcessor

from tests.toy_samples import MEDIA_OF_FAMILY, ToySample, encode_toy_sample, make_toy_sample
from vlm_stream.errors import BadSampleError
from vlm_stream.testing import FAMILIES, build_processor, make_toy_image
from vlm_stream.tokens import (
    FAKE_IMAGE_SIZE,
    FrameRule,
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    VideoSize,
    count_tokens,
    fake_image_tokens,
    make_columns,
)

# torch's tensors and numpy 2 disagree about keywords inside the GLM and Kimi processors; it is not about our counts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]


@cache
def load(family: str):
    """Return a processor as users have it, loaded from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        build_processor(family).save_pretrained(folder)
        processor = AutoProcessor.from_pretrained(folder)
    return processor, TextCounter(processor)


def count(counter: TextCounter, samples: list[ToySample]):
    text = counter.count_batch([(sample.conversation, sample.sizes) for sample in samples])
    return count_tokens(make_columns([sample.sizes for sample in samples], text), counter.geometry)


def vision_ids(processor, kinds) -> list[int]:
    """Ids of embeddings; the token that a template writes is not always the one that is repeated."""
    names = {"gemma3": ["<image_soft_token>"], "internvl": ["<IMG_CONTEXT>"], "nemotron_h_omni": ["<image>"]}
    tokens = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video") if kind in kinds]
    for family, own in names.items():
        if type(processor) is type(load(family)[0]):
            tokens = own
    return processor.tokenizer.convert_tokens_to_ids([token for token in tokens if token])


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_equal_the_length_of_input_ids(family):
    processor, counter = load(family)
    kinds = MEDIA_OF_FAMILY[family]
    rng = np.random.default_rng(17)
    samples = [make_toy_sample(rng, kinds, max_side=360) for _ in range(14)]
    shown = {kind for sample in samples for kind in kinds if getattr(sample.sizes, f"{kind}s")}
    assert shown == set(kinds)
    columns = count(counter, samples)
    for place, sample in enumerate(samples):
        ids = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"][0]
        assert columns.tokens[place] == len(ids), sample
        seen = np.isin(ids.numpy(), vision_ids(processor, kinds)).sum()
        assert columns.vision_tokens[place] == seen, sample


@pytest.mark.parametrize("family", sorted(family for family, kinds in MEDIA_OF_FAMILY.items() if "video" in kinds))
@pytest.mark.parametrize("frames", [1, 3, 7])
def test_short_clips(family, frames):
    processor, counter = load(family)
    size = VideoSize(frames=frames, height=90, width=130, fps=25.0, seconds=frames / 25.0)
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "video", "video": size}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    sample = ToySample(conversation, MediaSizes(videos=(size,)))
    ids = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"]
    assert count(counter, [sample]).tokens[0] == ids.shape[1]


# InternVL, LLaVA-OneVision and Nemotron stack the clips of a call and fail on clips of different lengths or sizes.
@pytest.mark.parametrize(
    "family", ["gemma4", "glm46v", "kimi_k25", "qwen2_5_vl", "qwen3_omni_moe", "qwen3_vl", "smolvlm"]
)
def test_several_clips_of_different_lengths(family):
    processor, counter = load(family)
    clips = (
        VideoSize(frames=5, height=60, width=90, fps=2.0, seconds=2.5),
        VideoSize(frames=40, height=70, width=50, fps=8.0, seconds=5.0),
    )
    items = [{"type": "video", "video": clip} for clip in clips]
    sample = ToySample([{"role": "user", "content": items}], MediaSizes(videos=clips))
    ids = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"]
    assert count(counter, [sample]).tokens[0] == ids.shape[1]


def test_another_frame_rule_changes_timestamps_and_is_followed():
    processor = build_processor("qwen3_vl")
    size = VideoSize(frames=300, height=64, width=64, fps=10.0, seconds=30.0)
    sample = ToySample([{"role": "user", "content": [{"type": "video", "video": size}]}], MediaSizes(videos=(size,)))
    lengths = []
    for rule in (FrameRule(fps=0.2), FrameRule(fps=1.0, max_frames=20)):
        geometry = Geometry.from_processor(processor, frames=rule)
        counter = TextCounter(processor, geometry)
        lengths.append(encode_toy_sample(processor, sample, rule)["input_ids"].shape[1])
        assert count(counter, [sample]).tokens[0] == lengths[-1]
    assert lengths[0] != lengths[1]


def test_gemma3_with_crops():
    crops = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 64,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    processor = build_processor("gemma3", image=crops)
    # The class switches crops off for every call; the count follows the call, not the config of the part.
    counter = TextCounter(processor)
    sample = one_image_sample(100, 400)
    ids = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"]
    assert count(counter, [sample]).tokens[0] == ids.shape[1]


def one_image_sample(height: int, width: int) -> ToySample:
    content = [{"type": "image", "image": make_toy_image(height, width)}, {"type": "text", "text": "What?"}]
    return ToySample(
        [{"role": "user", "content": content}], MediaSizes(images=(ImageSize(height=height, width=width),))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_fake_image_is_countable(family):
    processor, counter = load(family)
    sample = one_image_sample(*FAKE_IMAGE_SIZE)
    columns = count(counter, [sample])
    ids = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"]
    assert columns.tokens[0] == ids.shape[1]
    assert columns.vision_tokens[0] == fake_image_tokens(counter.geometry)


@pytest.mark.parametrize(("limits", "tokens"), [((3136, 1003520), 4), ((200704, 1003520), 256)])
def test_fake_image_grows_with_the_smallest_area(limits, tokens):
    processor = build_processor("qwen2_5_vl", image={"size": {"shortest_edge": limits[0], "longest_edge": limits[1]}})
    assert fake_image_tokens(Geometry.from_processor(processor)) == tokens


@pytest.mark.parametrize("number", [0, 2])
def test_template_that_shows_other_media_than_the_sample_has_is_a_bad_sample(number):
    _, counter = load("qwen2_5_vl")
    conversation = [{"role": "user", "content": [{"type": "image", "image": "0.jpg"}]}]
    sizes = MediaSizes(images=(ImageSize(height=30, width=30),) * number)
    with pytest.raises(BadSampleError, match=f"shows 1 images where the sample has {number}") as caught:
        counter.count(conversation, sizes)
    assert (caught.value.stage, caught.value.reason) == ("convert", "media_mismatch")


def test_batches_count_as_single_samples_do():
    _, counter = load("gemma3")
    rng = np.random.default_rng(3)
    samples = [make_toy_sample(rng, ["image"], max_side=60) for _ in range(6)]
    pairs = [(sample.conversation, sample.sizes) for sample in samples]
    assert counter.count_batch(pairs) == [counter.count(*pair) for pair in pairs]
