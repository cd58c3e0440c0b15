"""What a compact path reads from the processor, and what it refuses."""

import logging
import pickle
import types

import pytest
import torch
from torch.utils.data import DataLoader

from vlm_stream.collate import build_hf_pack, build_packed_vlm_sample, merge_media, shift_sample
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_SPEC_KEY
from vlm_stream.pixels import CompactPath, PartSpec, PixelSpec, carry_spec, finish_pixels
from vlm_stream.pixels.compact import _say_once, cut_patches
from vlm_stream.testing import build_processor, make_jpeg

CHAT = [
    {"role": "user", "content": [{"type": "image", "image": make_jpeg(60, 90)}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A toy."}]},
]
TEXT = [
    {"role": "user", "content": [{"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Nothing."}]},
]


@pytest.fixture
def fresh():
    return build_processor("qwen2_5_vl")


def encode(processor, pixels, **options):
    return Encoder(processor, EncodeConfig(pixels=pixels, **options)).encode(CHAT, {})


def assert_pixels_equal(processor, **options):
    finished = finish_pixels(encode(processor, "compact", **options), dtype=torch.float32)
    torch.testing.assert_close(
        finished["pixel_values"], encode(processor, "full", **options)["pixel_values"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_mean", [0.1, 0.2, 0.3]),
        ("image_std", [0.9, 0.5, 0.7]),
        ("rescale_factor", 1 / 127.5),
        ("resample", 2),
        ("do_normalize", False),
        ("do_resize", False),
        ("patch_size", 7),
        ("temporal_patch_size", 3),
    ],
)
def test_every_setting_is_the_processors(name, value):
    processor = build_processor("qwen2_5_vl", image={name: value})
    if name == "do_resize":
        chat = [{"role": "user", "content": [{"type": "image", "image": make_jpeg(56, 84)}]}, CHAT[1]]
        encoders = [Encoder(processor, EncodeConfig(pixels=pixels)) for pixels in ("full", "compact")]
        full, compact = (encoder.encode(chat, {}) for encoder in encoders)
        finished = finish_pixels(compact, dtype=torch.float32)
        torch.testing.assert_close(finished["pixel_values"], full["pixel_values"], rtol=0, atol=1e-6)
    else:
        assert_pixels_equal(processor)


def test_settings_changed_later_hold_for_both(fresh):
    compact = Encoder(fresh, EncodeConfig(pixels="compact"))
    compact.encode(CHAT, {})
    fresh.image_processor.image_mean = (0.1, 0.1, 0.1)
    finished = finish_pixels(compact.encode(CHAT, {}), dtype=torch.float32)
    torch.testing.assert_close(finished["pixel_values"], encode(fresh, "full")["pixel_values"], rtol=0, atol=1e-6)


def test_a_replaced_part_is_looked_at_again(fresh):
    assert CompactPath.for_processor(fresh)[0] is CompactPath.for_processor(fresh)[0]
    before = CompactPath.for_processor(fresh)[0]
    fresh.image_processor = build_processor("qwen2_5_vl", image={"patch_size": 7}).image_processor
    assert CompactPath.for_processor(fresh)[0] is not before


def test_the_original_is_not_touched(fresh):
    before = encode(fresh, "full")["pixel_values"]
    encode(fresh, "compact")
    assert type(fresh.image_processor).__name__ == "Qwen2VLImageProcessor"
    assert torch.equal(encode(fresh, "full")["pixel_values"], before)


def test_an_unknown_step_that_is_declared_is_refused(fresh):
    fresh.image_processor.do_center_crop = True
    path, reason = CompactPath.for_processor(fresh)
    assert path is None
    assert "steps that cannot be put off (do_center_crop)" in reason


def test_an_unknown_step_that_is_not_declared_is_refused(fresh):
    def brighten(self, *args):
        return kind.rescale_and_normalize(self, *args) + 0.01

    kind = type(fresh.image_processor)
    fresh.image_processor.__class__ = type(kind.__name__, (kind,), {"rescale_and_normalize": brighten})
    path, reason = CompactPath.for_processor(fresh)
    assert path is None
    assert "a step that is not known here" in reason


def test_a_step_that_fails_on_bytes_is_refused(fresh):
    def only_floats(self, images, **kwargs):
        return kind.patchify(self, torch.fft.fft(images).real, **kwargs)

    kind = type(fresh.image_processor)
    fresh.image_processor.__class__ = type(kind.__name__, (kind,), {"patchify": only_floats})
    path, reason = CompactPath.for_processor(fresh)
    assert path is None
    assert "no compact path" in reason


def test_a_processor_that_changes_no_values_is_refused():
    processor = build_processor("qwen2_5_vl", image={"do_rescale": False, "do_normalize": False})
    assert "nothing to put off" in CompactPath.for_processor(processor)[1]


def test_another_backend_is_refused(fresh):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    fresh.image_processor = Qwen2VLImageProcessorPil()
    with pytest.raises(ConfigError, match="its class is not known"):
        CompactPath(fresh)
    fresh.image_processor.__class__ = type("Qwen2VLImageProcessor", (Qwen2VLImageProcessorPil,), {})
    with pytest.raises(ConfigError, match="not resize with torchvision but with pil"):
        CompactPath(fresh)


def test_one_key_for_two_normalisations_is_refused():
    processor = build_processor("internvl")
    processor.video_processor.image_mean = (0.1, 0.2, 0.3)
    assert "normalises images and videos differently" in CompactPath.for_processor(processor)[1]


def test_a_family_without_a_path_says_so_and_stays_full(caplog):
    _say_once.cache_clear()  # another test may have heard it already
    processor = build_processor("llava_onevision")
    with caplog.at_level(logging.WARNING):
        sample = encode(processor, "compact")
        encode(processor, "compact")
    assert sample["pixel_values"].is_floating_point()
    assert PIXEL_SPEC_KEY not in sample
    lines = [record.message for record in caplog.records if "Pixels stay full" in record.message]
    assert len(lines) == 1
    assert "LlavaOnevisionProcessor has no compact path" in lines[0]


def test_an_encoder_can_be_sent_to_another_process(fresh):
    encoder = pickle.loads(pickle.dumps(Encoder(fresh, EncodeConfig(pixels="compact"))))
    assert torch.equal(encoder.encode(CHAT, {})["pixel_values"], encode(fresh, "compact")["pixel_values"])


def test_text_needs_no_spec(fresh):
    sample = Encoder(fresh, EncodeConfig(pixels="compact")).encode(TEXT, {})
    assert PIXEL_SPEC_KEY not in sample
    assert finish_pixels(sample).keys() == sample.keys()


def test_a_spec_survives_queues_and_files(fresh, tmp_path):
    sample = encode(fresh, "compact")
    torch.save(sample, tmp_path / "sample.pt")
    restored = torch.load(tmp_path / "sample.pt", weights_only=True)
    (from_worker,) = DataLoader([sample], batch_size=None, num_workers=1)
    for other in (restored, from_worker):
        assert torch.equal(finish_pixels(other)["pixel_values"], finish_pixels(sample)["pixel_values"])
    part = PartSpec(layout="patches", repeat=2, mean=(0.1, 1 / 3, 2.0), std=(1e-7, 1.0, 3.3))
    spec = PixelSpec(parts=(("pixel_values", part),))
    assert PixelSpec.load(spec.dump()) == spec


def test_full_pixels_are_only_converted(fresh):
    sample = encode(fresh, "full")
    finished = finish_pixels(sample, device="cpu")
    assert torch.equal(finished["pixel_values"], sample["pixel_values"].to(torch.bfloat16))
    assert torch.equal(finished["input_ids"], sample["input_ids"])


def test_bytes_that_nothing_explains_are_refused(fresh):
    sample = encode(fresh, "compact")
    lost = {key: value for key, value in sample.items() if key != PIXEL_SPEC_KEY}
    with pytest.raises(ConfigError, match=r"'pixel_values' holds bytes .* give spec="):
        finish_pixels(lost)
    finished = finish_pixels(lost, spec=sample[PIXEL_SPEC_KEY])
    assert torch.equal(finished["pixel_values"], finish_pixels(sample)["pixel_values"])


def test_compact_and_full_do_not_mix(fresh):
    with pytest.raises(ConfigError, match="pixels of different kinds"):
        merge_media([encode(fresh, "full"), encode(fresh, "compact")])
    other = build_processor("qwen2_5_vl", image={"image_mean": [0.1, 0.1, 0.1]})
    with pytest.raises(ConfigError, match="pixels of different kinds"):
        carry_spec([encode(fresh, "compact"), encode(other, "compact")])


def test_a_list_of_images_is_finished_one_by_one():
    part = PartSpec(layout="planes", repeat=1, mean=(1.0, 2.0, 3.0), std=(2.0, 2.0, 2.0))
    spec = PixelSpec(parts=(("pixel_values", part),))
    images = [torch.full((3, 2, size), 5, dtype=torch.uint8) for size in (1, 4)]
    finished = finish_pixels({"pixel_values": images}, dtype=torch.float32, spec=spec)["pixel_values"]
    assert [tuple(image.shape) for image in finished] == [(3, 2, 1), (3, 2, 4)]
    assert finished[1][:, 0, 0].tolist() == [2.0, 1.5, 1.0]


@pytest.mark.parametrize("pack", [build_hf_pack, lambda samples: build_packed_vlm_sample(samples, 4096, 0)])
def test_packs_hand_the_spec_on(fresh, pack):
    def packed(pixels):
        encoder = Encoder(fresh, EncodeConfig(pixels=pixels, inject_fake_image=True))
        return pack([shift_sample(encoder.encode(chat, {})) for chat in (CHAT, TEXT, CHAT)])

    full, compact = packed("full"), finish_pixels(packed("compact"), dtype=torch.float32)
    assert compact.keys() == full.keys()
    torch.testing.assert_close(compact["pixel_values"], full["pixel_values"], rtol=0, atol=1e-6)


def test_a_config_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match="pixels='tiny' means nothing here"):
        EncodeConfig(pixels="tiny")


def test_images_that_are_not_rgb_go_the_processors_own_way(fresh):
    from PIL import Image

    path, _ = CompactPath.for_processor(fresh)
    grey = Image.new("L", (40, 40), 77)
    full = fresh.image_processor(images=[grey], return_tensors="pt")
    compact = path.processor.image_processor(images=[grey], return_tensors="pt")
    finished = finish_pixels(dict(compact), dtype=torch.float32, spec=path.spec)
    torch.testing.assert_close(finished["pixel_values"], full["pixel_values"], rtol=0, atol=1e-6)


def test_a_pillow_without_arrow_is_copied_from(monkeypatch):
    from vlm_stream.pixels.compact import view_image
    from vlm_stream.testing import make_toy_image

    image = make_toy_image(20, 30)
    shared = view_image(image)
    without = types.SimpleNamespace(size=image.size, __array_interface__=image.__array_interface__)
    copied = view_image(without)
    assert shared.shape == (4, 20, 30)
    assert torch.equal(shared[:3], copied)


@pytest.mark.parametrize("num_images", [1, 3])
@pytest.mark.parametrize("num_bytes", [3, 4])
def test_patches_are_the_same_from_every_memory_layout(num_images, num_bytes):
    """Resized images lie in memory with three or four bytes a pixel, and as planes."""
    size = (num_images, 28 * 3, 28 * 5, num_bytes)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = pixels.permute(0, 3, 1, 2)[:, :3]
    planes = images.contiguous()
    expected = planes.view(num_images, 3, 3, 2, 14, 5, 2, 14).permute(0, 2, 5, 3, 6, 1, 4, 7)
    for layout in (images, planes):
        assert torch.equal(cut_patches(layout, 14, 2), expected.reshape(num_images, -1, 3 * 14 * 14))
