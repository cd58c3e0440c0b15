"""A geometry is a value: JSON, digest, what a processor's config says, the guess, and the columns it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.tokens import (
    AudioSize,
    FrameRule,
    Geometry,
    ImageSize,
    MediaSizes,
    VideoSize,
    check_media_sizes,
    count_tokens,
    guess_text_tokens,
    make_columns,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_survives_json_and_keeps_its_digest(family):
    geometry = Geometry.from_processor(build_processor(family))
    again = Geometry.from_json(json.loads(json.dumps(geometry.to_json())))
    assert again == geometry
    assert again.digest() == geometry.digest()
    assert geometry.family == family
    assert geometry.is_exact


def test_digest_changes_with_every_number():
    first = Geometry.from_processor(build_processor("qwen2_5_vl"))
    larger = {"size": {"shortest_edge": 3136, "longest_edge": 50176}}
    others = [
        Geometry.from_processor(build_processor("qwen2_5_vl", image=larger)),
        replace(first, frames=FrameRule(fps=1.0)),
        replace(first, family="qwen2_vl"),
    ]
    assert len({geometry.digest() for geometry in (first, *others)}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "has version 9 and this package reads version 1: make it again"),
        ({"imag": None}, "A geometry has no field 'imag': did you mean 'image'"),
        (
            {"image": {"rule": "PatchGird"}},
            "rule 'PatchGird' is not known.*did you mean 'PatchGrid'.*vlm-stream recount",
        ),
        (
            {"image": {"rule": "PatchGrid", "patch": 1}},
            "PatchGrid has no field 'patch'.*'patch_size'.*vlm-stream recount",
        ),
    ],
)
def test_json_of_another_kind_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Geometry.from_json({**Geometry.unknown().to_json(), **change})


def test_frame_rules_of_processors():
    rules = {family: Geometry.from_processor(build_processor(family)).frames for family in FAMILIES}
    assert rules["qwen2_5_vl"] == FrameRule(fps=2.0, min_frames=4, max_frames=768, temporal_patch_size=2)
    assert rules["gemma4"] == FrameRule(fps=2.0, min_frames=4, max_frames=32, temporal_patch_size=1)
    assert rules["kimi_k25"].temporal_patch_size == 4
    assert rules["smolvlm"] == FrameRule(fps=1.0, min_frames=4, max_frames=64, temporal_patch_size=1)


def test_size_without_limits_is_named():
    processor = build_processor("qwen2_5_vl")
    processor.image_processor.size = {"height": 3, "width": 3}
    with pytest.raises(ConfigError, match=r"Qwen2_5_VLProcessor\.image_processor has no min_pixels or shortest_edge"):
        Geometry.from_processor(processor)


class NewProcessor:
    tokenizer = None
    image_processor = "anything"


def test_a_processor_that_cannot_be_asked_is_estimated_and_says_so(caplog):
    geometry = Geometry.from_processor(NewProcessor())
    assert (geometry.family, geometry.image, geometry.video) == ("NewProcessor", Geometry.unknown().image, None)
    assert not geometry.is_exact
    assert "NewProcessor cannot be asked what media cost" in caplog.text


def test_a_part_that_is_missing_reads_nothing():
    processor = build_processor("kimi_k25")
    whole = Geometry.from_processor(processor)
    del processor.video_processor
    assert Geometry.from_processor(processor) == replace(whole, video=None, frames=FrameRule())


def test_subclasses_of_known_processors_are_known():
    kind = type("MyProcessor", (type(build_processor("qwen3_vl")),), {})
    processor = build_processor("qwen3_vl")
    processor.__class__ = kind
    assert Geometry.from_processor(processor).family == "qwen3_vl"


def test_bare_tokenizer_reads_text_alone():
    tokenizer = build_processor("qwen3_vl").tokenizer
    geometry = Geometry.from_processor(tokenizer)
    assert (geometry.family, geometry.image, geometry.is_exact) == ("text", None, True)


def test_without_a_processor_text_is_a_third_of_the_characters_and_media_follow_their_sizes():
    conversation = [
        {"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "eleven char"}]},
        {"role": "user", "content": [{"type": "video", "video": "b"}, {"type": "audio", "audio": "c"}]},
    ]
    sizes = MediaSizes(
        images=(ImageSize(height=280, width=560),),
        videos=(VideoSize(frames=4, height=336, width=336, fps=2.0),),
        audios=(AudioSize(samples=32000, rate=16000),),
    )
    text = guess_text_tokens(conversation)
    counts = count_tokens(make_columns([sizes], [text]), Geometry.unknown())
    assert (counts.tokens[0], counts.vision_tokens[0]) == (3 + 200 + 288 + 26, 488)


def test_rows_are_counted_one_by_one():
    """The sum over a column equals each sample alone, whatever its neighbours are."""
    geometry = Geometry.from_processor(build_processor("qwen3_omni_moe"))
    rng = np.random.default_rng(0)
    samples = [
        MediaSizes(
            images=tuple(
                ImageSize(height=int(h), width=int(w)) for h, w in rng.integers(20, 900, (int(rng.integers(4)), 2))
            ),
            videos=tuple(
                VideoSize(frames=9, height=50, width=int(w), fps=8.0) for w in rng.integers(9, 99, int(rng.integers(2)))
            ),
            audios=tuple(AudioSize(samples=int(n), rate=8000) for n in rng.integers(9, 9999, int(rng.integers(3)))),
        )
        for _ in range(40)
    ]
    columns = make_columns(samples, range(40))
    together = count_tokens(columns, geometry)
    some = np.flatnonzero(rng.random(40) < 0.5)
    picked = count_tokens(columns.narrowed().pick(some), geometry)
    for column in ("tokens", "vision_tokens", "vision_patches", "vision_squares"):
        np.testing.assert_array_equal(getattr(picked, column), getattr(together, column)[some])
    for place, sample in enumerate(samples):
        alone = count_tokens(make_columns([sample], [place]), geometry)
        for column in ("tokens", "vision_tokens", "vision_patches", "vision_squares"):
            assert getattr(together, column)[place] == getattr(alone, column)[0]


def test_no_rows_are_no_rows():
    counts = count_tokens(make_columns([], []), Geometry.unknown())
    assert [len(column) for column in (counts.tokens, counts.vision_tokens, counts.vision_patches)] == [0, 0, 0]


def test_vision_work_of_a_clip_is_per_frame():
    geometry = Geometry.from_processor(build_processor("qwen2_5_vl"))
    clip = MediaSizes(videos=(VideoSize(frames=8, height=320, width=320, fps=2.0),))
    counts = count_tokens(make_columns([clip], [1]), geometry)
    assert counts.vision_patches[0] == 4 * counts.vision_tokens[0]
    assert counts.vision_squares[0] == 4 * (counts.vision_patches[0] / 4) ** 2


@pytest.mark.parametrize(
    ("family", "sizes", "reason", "message"),
    [
        (
            "qwen2_5_vl",
            {"images": (ImageSize(height=2, width=401),)},
            "extreme_shape",
            "image number 1.*2x401.*above 200",
        ),
        (
            "qwen3_vl",
            {"videos": (VideoSize(frames=4, height=9, width=9000),)},
            "extreme_shape",
            "video number 1.*ratio",
        ),
        ("phi4_multimodal", {"images": (ImageSize(height=1, width=440),)}, "extreme_shape", "scaled to nothing"),
        (
            "gemma3",
            {"videos": (VideoSize(frames=4, height=9, width=9),)},
            "unsupported_medium",
            "gemma3 processor reads no",
        ),
        (
            "qwen3_vl",
            {"audios": (AudioSize(samples=9, rate=9),)},
            "unsupported_medium",
            "audio number 1.*reads no such",
        ),
        ("gemma3", {"images": (ImageSize(height=0, width=4),)}, "empty_medium", "0x4 pixels"),
        ("gemma4", {"audios": (AudioSize(samples=0, rate=9),)}, "empty_medium", "0 samples at 9 Hz"),
    ],
)
def test_media_that_a_processor_refuses_are_bad_samples(family, sizes, reason, message):
    geometry = Geometry.from_processor(build_processor(family))
    with pytest.raises(BadSampleError, match=message) as caught:
        check_media_sizes(MediaSizes(**sizes), geometry)
    assert (caught.value.stage, caught.value.reason) == ("convert", reason)


def test_without_a_processor_the_common_limit_holds():
    check_media_sizes(MediaSizes(images=(ImageSize(height=1, width=200),)), Geometry.unknown())
    with pytest.raises(BadSampleError, match="1x201 have a ratio above 200"):
        check_media_sizes(MediaSizes(images=(ImageSize(height=1, width=201),)), Geometry.unknown())


def test_importing_needs_numpy_alone():
    code = "import sys, vlm_stream.tokens; assert not {'torch', 'transformers', 'pyarrow', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
