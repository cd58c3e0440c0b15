"""The proof for each family: what compact pixels are finished to is what the processor itself gives."""

import numpy as np
import pytest
import torch

from tests.odd_images import make_16bit_png, make_cmyk_jpeg, make_palette_gif, make_rotated_jpeg
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.keys import PIXEL_SPEC_KEY
from vlm_stream.pixels import CompactPath, finish_pixels
from vlm_stream.pixels.compact import COMPACT_FAMILIES
from vlm_stream.testing import (
    build_processor,
    make_grey_jpeg,
    make_jpeg,
    make_mp4,
    make_palette_png,
    make_png_with_alpha,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers

TOLERANCE = 1e-6
ENCODINGS = (
    make_jpeg,
    make_png_with_alpha,
    make_grey_jpeg,
    make_cmyk_jpeg,
    make_palette_png,
    make_palette_gif,
    make_16bit_png,
    make_rotated_jpeg,
)
PLAIN_SIZES = [(1, 1), (2, 3), (9, 9), (27, 29), (28, 28), (10, 1990), (1990, 10), (7, 400), (333, 11), (640, 480)]
HUGE = (2100, 2300)  # above 16 MB, which Pillow keeps in several blocks


def draw_images(num_images: int) -> list[bytes]:
    rng = np.random.default_rng(5)
    sizes = [*PLAIN_SIZES, HUGE]
    sizes += [(int(h), int(w)) for h, w in np.exp(rng.uniform(np.log(8), np.log(300), (num_images - len(sizes), 2)))]
    return [ENCODINGS[n % len(ENCODINGS) if n >= 11 else 0](*size, seed=n) for n, size in enumerate(sizes)]


def ask(items: list[dict]) -> list[dict]:
    question = {"type": "text", "text": "What is this?"}
    return [
        {"role": "user", "content": [*items, question]},
        {"role": "assistant", "content": [{"type": "text", "text": "A toy."}]},
    ]


@pytest.fixture(scope="module", params=sorted(COMPACT_FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def encoders(family):
    # Small upper limits keep the huge image cheap; the rules stay the family's own.
    limits = {"size": {"shortest_edge": 56 * 56, "longest_edge": 640 * 640}}
    options = {} if family in ("gemma3", "internvl") else {"image": limits}
    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe"):
        options["video"] = {"cap_pixels_per_frame": False}
    processor = build_processor(family, **options)
    return [Encoder(processor, EncodeConfig(pixels=pixels)) for pixels in ("full", "compact")]


def assert_same(full: dict, compact: dict) -> None:
    assert PIXEL_SPEC_KEY in compact
    finished = finish_pixels(compact, dtype=torch.float32)
    assert finished.keys() == full.keys()
    for key, value in full.items():
        if key in ("pixel_values", "pixel_values_videos"):
            assert compact[key].dtype == torch.uint8
            assert finished[key].shape == value.shape
            assert finished[key].dtype == value.dtype
            assert float((finished[key] - value).abs().max()) <= TOLERANCE
            assert finished[key].is_contiguous()
        elif isinstance(value, torch.Tensor):
            assert torch.equal(finished[key], value), key
        else:
            assert finished[key] == value, key


def test_a_hundred_images(family, encoders):
    full, compact = encoders
    images = draw_images(100)
    while images:
        count = 1 + len(images) % 3
        conversation = ask([{"type": "image", "image": image} for image in images[:count]])
        expected = full.encode(conversation, {})
        found = compact.encode(conversation, {})
        assert_same(expected, found)
        if family not in ("gemma3", "internvl"):  # half of the values, in a quarter of the bytes
            assert found["pixel_values"].nbytes * 8 == expected["pixel_values"].nbytes
        images = images[count:]


def test_ten_videos(family, encoders):
    full, compact = encoders
    if "video" not in full.reads.media:
        pytest.skip("the family reads no videos")
    for number in range(10):
        clip = make_mp4(
            num_frames=5 + 3 * number, height=32 + 26 * number, width=240 - 18 * number, fps=4 + number, seed=number
        )
        items = [{"type": "video", "video": clip}]
        if number % 3 == 2:
            items.append({"type": "image", "image": make_jpeg(50, 61, seed=number)})
        expected = full.encode(ask(items), {})
        assert_same(expected, compact.encode(ask(items), {}))


def test_aspect_ratios_that_the_processor_refuses_are_refused(family, encoders):
    if family in ("gemma3", "internvl"):
        pytest.skip("the family takes any ratio")
    from vlm_stream.errors import BadSampleError

    for encoder in encoders:
        with pytest.raises(BadSampleError, match="aspect ratio"):
            encoder.encode(ask([{"type": "image", "image": make_jpeg(1, 250)}]), {})


def test_the_path_is_offered(family):
    path, reason = CompactPath.for_processor(build_processor(family))
    assert path is not None
    assert reason == ""
