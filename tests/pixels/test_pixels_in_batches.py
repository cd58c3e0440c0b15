"""Batches of every collation, with holes, fillers, fake images and pipelines: compact ones finish to the full ones."""

import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from vlm_stream import StreamLoader
from vlm_stream.collate import (
    PositionRule,
    build_hf_pack,
    build_packed_vlm_sample,
    default_collate_fn,
    merge_media,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
    qwen2_5_collate_fn,
    qwen3_omni_collate_fn,
    shift_sample,
)
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_SPEC_KEY
from vlm_stream.pixels import DeviceFeed, finish_pixels
from vlm_stream.pp_media import VLM_PP_MEDIA_KEY, drop_vlm_media, stage_vlm_media_for_pp, take_vlm_media
from vlm_stream.testing import build_processor, build_tiny_model, make_jpeg

PIXELS = ("pixel_values", "pixel_values_videos")
TOLERANCE = {"rtol": 0, "atol": 1e-6}


def join_in_my_own_way(samples, processor):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = [torch.nn.functional.pad(sample["input_ids"], (0, longest - len(sample["input_ids"]))) for sample in samples]
    media = merge_media(samples)
    return {"input_ids": torch.stack(ids)} | {key: media[key] for key in PIXELS if key in media}


MODES = {
    "packed": {"pack_size": 1024},
    "packed, fake images": {"pack_size": 1024, "fake_image": True, "batch_size": 2},
    "plain": {"mode": "plain", "batch_size": 3},
    "grouped, shifted labels": {"mode": "grouped", "batch_size": 3, "hf_labels": False},
    "my own": {"mode": "plain", "batch_size": 3, "collate_fn": join_in_my_own_way},
}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key in PIXELS:
            torch.testing.assert_close(found[key].float(), value.float(), **TOLERANCE)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


@pytest.mark.parametrize("mode", MODES)
def test_compact_batches_finish_to_the_full_ones(toy_shards, processor, mode):
    options = MODES[mode]
    dtype = torch.bfloat16 if mode == "grouped, shifted labels" else torch.float32  # what that collation gives
    full = list(StreamLoader(toy_shards, processor=processor, **options))
    compact = list(StreamLoader(toy_shards, processor=processor, pixels="compact", **options))
    assert sum(PIXEL_SPEC_KEY in batch for batch in compact) > len(compact) // 2
    for found, expected in zip(compact, full, strict=True):
        assert all(found[key].dtype == torch.uint8 for key in PIXELS if key in found)
        assert_equal(finish_pixels(found, dtype=dtype), expected)


def test_the_loss_is_the_same(toy_shards, processor):
    model = build_tiny_model("qwen2_5_vl", processor).eval()
    full = StreamLoader(toy_shards, processor=processor, pack_size=1024)
    compact = StreamLoader(toy_shards, processor=processor, pack_size=1024, device="cpu", dtype=torch.float32)
    for _, one, other in zip(range(4), full, compact, strict=False):
        losses = [model(**batch, use_cache=False).loss.item() for batch in (one, other)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "qwen3_vl"])
def test_the_loss_of_other_families_is_the_same(family):
    processor = build_processor(family)
    model = build_tiny_model(family, processor).eval()
    chat = [
        {"role": "user", "content": [{"type": "image", "image": make_jpeg(80, 99)}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A toy."}]},
    ]
    losses = []
    for pixels in ("full", "compact"):
        sample = Encoder(processor, EncodeConfig(pixels=pixels)).encode(chat, {})
        pack = build_hf_pack([sample], positions=PositionRule.from_processor(processor))
        losses.append(model(**finish_pixels(pack, dtype=torch.float32), use_cache=False).loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_with_a_device_delivers_finished_batches(toy_shards, processor, num_workers):
    full = list(StreamLoader(toy_shards, processor=processor, pack_size=1024))
    loader = StreamLoader(
        toy_shards, processor=processor, pack_size=1024, num_workers=num_workers, device="cpu", dtype=torch.float32
    )
    assert loader.stream.options.pixels == "compact"
    for found, expected in zip(loader, full, strict=True):
        assert_equal(found, expected)


def test_a_loader_with_a_device_may_stay_full(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024, device="cpu", pixels="full")
    batch = next(batch for batch in loader if "pixel_values" in batch)
    assert loader.stream.options.pixels == "full"
    assert batch["pixel_values"].dtype == torch.bfloat16


def test_a_family_without_a_path_is_delivered_all_the_same(image_shards):
    processor = build_processor("llava_onevision")
    loader = StreamLoader(image_shards, processor=processor, mode="plain", device="cpu", dtype=torch.float16)
    batch = next(batch for batch in loader if "pixel_values" in batch)
    assert batch["pixel_values"].dtype == torch.float16


def test_a_dtype_without_a_device_is_refused(processor):
    with pytest.raises(ConfigError, match=r"no device is given, so nothing would be converted"):
        StreamLoader("nowhere", processor=processor, pack_size=1024, dtype=torch.float16)
    with pytest.raises(ConfigError, match="pixels is 'compct'; did you mean 'compact'"):
        StreamLoader("nowhere", processor=processor, pack_size=1024, pixels="compct")


def test_a_hole_stays_a_hole(toy_shards, processor, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    shard = folder / "shard-000002.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 0xFF
    shard.write_bytes(data)
    options = {"processor": processor, "mode": "plain", "batch_size": 2}
    full, compact = (list(StreamLoader(folder, pixels=pixels, **options)) for pixels in ("full", "compact"))
    for found, expected in zip(compact, full, strict=True):
        assert_equal(finish_pixels(found, dtype=torch.float32), expected)


def test_fillers_need_no_pixels(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, mode="plain", rank=58, world_size=59, device="cpu")
    last = list(loader)[-1]
    assert not (last["labels"] != -100).any()


PIPELINE = {"pack_size": 1024, "batch_size": 3, "pp_microbatches": 2, "fake_image": True}


def test_a_pipeline_finishes_one_micro_batch_at_a_time(toy_shards, processor):
    full = next(iter(StreamLoader(toy_shards, processor=processor, **PIPELINE)))[VLM_PP_MEDIA_KEY]
    compact = next(iter(StreamLoader(toy_shards, processor=processor, pixels="compact", **PIPELINE)))
    assert PIXEL_SPEC_KEY not in compact
    part = torch.nn.Linear(1, 1)
    pp = SimpleNamespace(info=SimpleNamespace(has_first_stage=True, stages=[], schedule=None))
    with stage_vlm_media_for_pp(pp, [part], compact):
        assert all(chunk.dtype == torch.uint8 for chunk in part._vlm_pixel_values_chunks.chunks)
        for micro in range(2):
            expected = {key: full[key][micro] for key in full if len(full[key][micro])}
            assert_equal(take_vlm_media(part, list(full)), expected)
            torch.testing.assert_close(part._vlm_pixel_values_chunks[micro], full["pixel_values"][micro], **TOLERANCE)
    assert VLM_PP_MEDIA_KEY not in compact


def test_a_loader_with_a_device_leaves_a_pipelines_pixels_compact_until_read(toy_shards, processor):
    full = next(iter(StreamLoader(toy_shards, processor=processor, **PIPELINE)))[VLM_PP_MEDIA_KEY]
    loader = StreamLoader(toy_shards, processor=processor, device="cpu", dtype=torch.float32, **PIPELINE)
    chunks = next(iter(loader))[VLM_PP_MEDIA_KEY]
    assert chunks.keys() == full.keys()
    for key, expected in full.items():
        for found, value in zip(chunks[key][:], expected, strict=True):
            torch.testing.assert_close(found, value, **TOLERANCE)


def test_ranks_without_the_first_stage_drop_everything(toy_shards, processor):
    batch = next(iter(StreamLoader(toy_shards, processor=processor, pixels="compact", pack_size=1024)))
    kept = drop_vlm_media(dict(batch))
    assert not {PIXEL_SPEC_KEY, *PIXELS} & kept.keys()


def chat_about(height, width):
    image = {"type": "image", "image": make_jpeg(height, width)}
    return [
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A toy."}]},
    ]


@pytest.mark.parametrize("collate", [default_collate_fn, qwen2_5_collate_fn])
def test_conversations_are_collated_compact(processor, collate):
    examples = [{"conversation": chat_about(40, 90)}, {"conversation": chat_about(77, 51)}]
    full = collate(examples, processor)
    compact = collate(examples, processor, pixels="compact")
    assert compact["pixel_values"].dtype == torch.uint8
    assert_equal(finish_pixels(compact, dtype=full["pixel_values"].dtype), full)


def test_omni_conversations_are_collated_compact():
    omni = build_processor("qwen3_omni_moe")
    examples = [{"conversation": chat_about(40, 90)}, {"conversation": chat_about(77, 51)}]
    full = qwen3_omni_collate_fn(examples, omni)
    compact = qwen3_omni_collate_fn(examples, omni, pixels="compact")
    assert compact["pixel_values"].dtype == torch.uint8
    assert_equal(finish_pixels(compact, dtype=full["pixel_values"].dtype), full)


def test_encoded_samples_are_padded_compact(processor):
    full, compact = (
        pad_collate_fn([Encoder(processor, EncodeConfig(pixels=p)).encode(chat_about(40, 90), {})] * 2, processor)
        for p in ("full", "compact")
    )
    assert compact["pixel_values"].dtype == torch.uint8
    assert_equal(finish_pixels(compact), full)


@pytest.mark.parametrize("collate", [neat_packed_vlm_collater, packed_sequence_thd_vlm_collater])
def test_packs_are_collated_compact(processor, collate):
    def collated(pixels):
        encoder = Encoder(processor, EncodeConfig(pixels=pixels))
        samples = [shift_sample(encoder.encode(chat_about(40, 90 + n), {})) for n in range(2)]
        return collate([build_packed_vlm_sample(samples, 4096, 0)] * 2)

    assert_equal(finish_pixels(collated("compact"), dtype=torch.bfloat16), collated("full"))


def test_batches_sent_ahead_do_not_move_the_state(toy_shards, processor):
    options = {"processor": processor, "pack_size": 1024, "device": "cpu", "dtype": torch.float32}
    plain, ahead = (StreamLoader(toy_shards, **options) for _ in range(2))
    ahead._feed.depth = 1
    for one, other in zip(plain, ahead, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert plain.state_dict() == ahead.state_dict()


def test_a_worker_that_dies_repeats_nothing_that_was_sent_ahead(nothing_is_late, toy_shards, processor):
    expected = [batch["input_ids"] for batch in StreamLoader(toy_shards, processor=processor, pack_size=1024)]
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024, num_workers=1, device="cpu")
    loader._feed.depth = 1
    found = []
    for batch in loader:
        found.append(batch["input_ids"])
        if len(found) == 2:
            os.kill(loader.worker_pids()[0], signal.SIGKILL)
    assert loader.metrics()["worker_restarts"] == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_dtype_may_be_named_and_must_be_a_float():
    assert DeviceFeed("cpu", "float16").dtype == torch.float16
    for wrong in ("float13", torch.uint8):
        with pytest.raises(ConfigError, match="no floating-point dtype of torch"):
            DeviceFeed("cpu", wrong)


def test_a_device_that_is_not_there_is_named():
    for wrong in ("gpu", 2.5):
        with pytest.raises(ConfigError, match=f"device is {wrong!r}, which is no device of torch"):
            DeviceFeed(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU does")
def test_without_a_gpu_a_feed_of_cuda_says_so_when_it_is_used():
    feed = DeviceFeed("cuda")  # a driver without a GPU may make one
    with pytest.raises(ConfigError, match=r"device is cuda, and torch finds no GPU here.*leave device out"):
        list(feed.batches([{"number": torch.tensor(1)}], dict))


def test_a_feed_keeps_the_order():
    feed = DeviceFeed("cpu", torch.float32)
    for depth in (0, 1, 3, 9):
        feed.depth = depth
        items = [{"number": torch.tensor(n)} for n in range(5)]
        assert [int(batch["number"]) for _, batch in feed.batches(items, dict)] == [0, 1, 2, 3, 4]


def test_every_tensor_of_a_batch_is_seen_when_streams_meet(toy_shards, processor):
    from vlm_stream.pixels.finish import _each_tensor

    batch = next(iter(StreamLoader(toy_shards, processor=processor, device="cpu", **PIPELINE)))
    seen = []
    _each_tensor(batch, seen.append)
    compact = batch[VLM_PP_MEDIA_KEY]["pixel_values"].chunks
    assert {id(chunk) for chunk in compact} <= {id(tensor) for tensor in seen}
    assert id(batch["input_ids"]) in {id(tensor) for tensor in seen}


def test_what_holds_no_tensor_travels_to_a_device_as_it_is():
    from vlm_stream.pixels.finish import _each_tensor

    batch = {"refs": [[("source", "shard", "key")]], "sizes": [torch.tensor(1), torch.tensor(2)], "n": (1, 2)}
    moved = _each_tensor(batch, torch.clone)
    assert (moved["refs"], moved["n"], moved["sizes"]) == (batch["refs"], (1, 2), batch["sizes"])
    assert moved["sizes"][0] is not batch["sizes"][0]
