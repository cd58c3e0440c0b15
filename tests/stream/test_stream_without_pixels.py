"""Ranks without the first stage: the same tokens, labels and positions, the same state, and no byte of media."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import pytest
import torch

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.convert import index_tars
from vlm_stream.errors import ConfigError
from vlm_stream.keys import MEDIA_KEYS
from vlm_stream.options import StreamOptions
from vlm_stream.pp_media import VLM_PP_MEDIA_KEY
from vlm_stream.testing import build_processor, build_tiny_model, make_jpeg

PIXELS = {"pixel_values", "pixel_values_videos"}
MODES = {
    "packed": {"pack_size": 1024, "batch_size": 2},
    "packed with masks": {"pack_size": 1024, "attention": "mask4d"},
    "plain": {"mode": "plain", "batch_size": 4},
    "grouped": {"mode": "grouped", "batch_size": 3, "micro_batches": 2},
    "shifted": {"mode": "plain", "batch_size": 4, "hf_labels": False},
}
MIB = 1 << 20


def make_loader(shards, processor, **options):
    return StreamLoader(shards, processor=processor, with_refs=True, window=32, **options)


def write_captions(folder, num_samples, size):
    """Write a tar as others do: a picture, facts and a caption."""
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number in range(num_samples):
            parts = {"jpg": make_jpeg(*size, number), "json": b'{"url": ""}', "txt": f"caption {number}".encode()}
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{number:03d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    index_tars([str(folder / "0.tar")])


def assert_same(thin, full, missing=PIXELS):
    assert set(thin) == set(full) - set(missing)
    for key, value in thin.items():
        assert torch.equal(value, full[key]) if isinstance(value, torch.Tensor) else value == full[key], key


@pytest.mark.parametrize(
    ("mode", "fake_image"),
    [
        ("packed", False),
        ("packed", True),
        ("packed with masks", False),
        ("plain", True),
        ("grouped", False),
        ("shifted", False),
    ],
)
def test_batches_are_the_same_but_for_pixels(toy_shards, processor, mode, fake_image):
    options = MODES[mode] | {"fake_image": fake_image}
    full, thin = (make_loader(toy_shards, processor, pixels=pixels, **options) for pixels in (True, False))
    for left, right in zip(thin, full, strict=True):
        assert_same(left, right)
    assert thin.metrics()["samples"] == 60


@pytest.mark.parametrize("mode", ["packed", "plain"])
def test_a_pipeline_gets_positions_and_no_media_at_all(toy_shards, processor, mode):
    options = MODES[mode] | {"pp_microbatches": 2}
    full, thin = (list(make_loader(toy_shards, processor, pixels=pixels, **options)) for pixels in (True, False))
    for left, right in zip(thin, full, strict=True):
        assert not {*MEDIA_KEYS, VLM_PP_MEDIA_KEY} & set(left)
        assert left["position_ids"].shape[1:] == left["input_ids"].shape
        assert_same(left, right, {VLM_PP_MEDIA_KEY})
    assert any(VLM_PP_MEDIA_KEY in batch for batch in full)


def test_the_text_members_are_all_that_is_read(toy_shards, processor):
    num_bytes = 0
    for shard in toy_shards.glob("*.tar"):
        with tarfile.open(shard) as tar:
            num_bytes += sum(member.size for member in tar if member.name.endswith(".json"))
    loaders = [make_loader(toy_shards, processor, pixels=pixels, **MODES["packed"]) for pixels in (True, False)]
    full, thin = ([*loader] and loader.metrics() for loader in loaders)
    assert (full["samples"], thin["samples"]) == (60, 60)
    assert num_bytes <= thin["bytes_read"] <= 1.5 * num_bytes
    assert 5 * thin["bytes_read"] < full["bytes_read"]  # with pictures of a few kilobytes


def test_far_fewer_bytes_are_read_beside_photographs(processor, tmp_path):
    write_captions(tmp_path, 12, (720, 1280))
    loaders = [make_loader(tmp_path, processor, pixels=pixels, mode="plain") for pixels in (True, False)]
    full, thin = ([*loader] and loader.metrics() for loader in loaders)
    assert 1000 * thin["bytes_read"] < full["bytes_read"]


def test_the_node_cache_is_not_filled(toy_shards, processor, s3_server, tmp_path):
    from vlm_stream.storage import open_store

    url = s3_server.url("without-pixels")
    store = open_store(url, s3_server.options)
    for path in toy_shards.iterdir():
        store.put(path.name, path.read_bytes())
    options = StreamOptions(
        pack_size=1024, pixels=False, cache_dir=str(tmp_path / "cache"), cache_bytes=64 * MIB, store=s3_server.options
    )
    deliveries = list(VLMStream(url, processor=processor, options=options).deliveries())
    reads = deliveries[-1][1].reads
    assert (reads.samples, reads.cache_downloads, reads.cache_hits) == (60, 0, 0)
    assert reads.bytes_read <= 1.5 * reads.bytes_wanted
    assert not list(tmp_path.glob("cache/**/*.tar"))


@pytest.mark.parametrize("mode", ["packed", "plain"])
def test_a_state_belongs_to_ranks_with_and_without_pixels(toy_shards, processor, mode):
    options = MODES[mode]
    loaders = {pixels: make_loader(toy_shards, processor, pixels=pixels, **options) for pixels in (True, False)}
    states = {}
    for pixels, loader in loaders.items():
        for _ in zip(range(3), loader, strict=False):
            states[pixels] = json.dumps(loader.state_dict(), sort_keys=True)
    assert states[True] == states[False]
    rest = {}
    for pixels in (True, False):
        loader = make_loader(toy_shards, processor, pixels=pixels, **options)
        loader.load_state_dict(json.loads(states[not pixels]))
        rest[pixels] = list(loader)
    assert len(rest[True]) == len(rest[False]) > 0
    for left, right in zip(rest[False], rest[True], strict=True):
        assert_same(left, right)


def test_workers_make_them_too(toy_shards, processor):
    alone = list(make_loader(toy_shards, processor, pixels=False, **MODES["packed"]))
    helped = list(make_loader(toy_shards, processor, pixels=False, num_workers=1, **MODES["packed"]))
    for left, right in zip(helped, alone, strict=True):
        assert_same(left, right, set())


def test_a_damaged_medium_is_seen_where_it_is_decoded_alone(toy_shards, processor, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    shard = folder / "shard-000001.tar"
    with tarfile.open(shard) as tar:
        medium = next(member for member in tar if member.name.endswith(".jpg"))
    data = bytearray(shard.read_bytes())
    data[medium.offset_data + medium.size // 2] ^= 0xFF
    shard.write_bytes(data)
    full, thin = (make_loader(folder, processor, pixels=pixels, **MODES["packed"]) for pixels in (True, False))
    batches = list(zip(full, thin, strict=True))
    assert (full.ledger.num_bad, thin.ledger.num_bad) == (1, 0)
    differing = [left["refs"] != right["refs"] for left, right in batches]
    assert sum(differing) == 1  # the step that a trainer has to leave out


def test_tars_of_others_are_read_by_their_text_member(processor, tmp_path):
    write_captions(tmp_path, 6, (200, 300))
    full, thin = (
        make_loader(tmp_path, processor, pixels=pixels, mode="plain", batch_size=2) for pixels in (True, False)
    )
    for left, right in zip(thin, full, strict=True):
        assert_same(left, right)
    assert thin.ledger.by_reason() == full.ledger.by_reason() == {}


def test_the_models_config_decides_positions(toy_shards, processor):
    def config(tokens_per_second):
        return {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": tokens_per_second}}

    for mode in (MODES["packed"], MODES["plain"] | {"pp_microbatches": 1}):
        slow, fast, default = (
            [batch["position_ids"] for batch in make_loader(toy_shards, processor, pixels=False, **mode, **rule)]
            for rule in ({"model_config": config(2)}, {"model_config": config(25.0)}, {})
        )
        assert all(map(torch.equal, slow, default))
        assert not all(map(torch.equal, slow, fast))


def test_padded_rows_of_a_pipeline_have_the_positions_that_the_model_would_take(toy_shards, processor):
    model = build_tiny_model("qwen2_5_vl", processor)
    options = MODES["plain"] | {"model_config": model.config}
    whole = make_loader(toy_shards, processor, **options)
    cut = make_loader(toy_shards, processor, pp_microbatches=2, **options)
    for left, right in zip(whole, cut, strict=True):
        names = ("input_ids", "mm_token_type_ids", "attention_mask", "image_grid_thw", "video_grid_thw")
        given = {name: left[name] for name in (*names, "second_per_grid_ts") if name in left}
        expected, _ = model.model.get_rope_index(**given)
        visible = left["attention_mask"].bool()
        assert torch.equal(right["position_ids"][:, visible], expected[:, visible])
        if VLM_PP_MEDIA_KEY in right and "pixel_values" in left:
            assert torch.equal(torch.cat(right[VLM_PP_MEDIA_KEY]["pixel_values"]), left["pixel_values"])


def test_omni_families_are_packed_without_a_model_config(image_shards):
    loader = StreamLoader(image_shards, processor=build_processor("qwen3_omni_moe"), pack_size=4096)
    batch = next(iter(loader))
    assert batch["position_ids"].shape[1:] == batch["input_ids"].shape


def test_other_families_are_refused_before_the_first_sample(image_shards):
    for family in ("gemma3", "smolvlm"):
        loader = StreamLoader(image_shards, processor=build_processor(family), pack_size=4096, pixels=False)
        with pytest.raises(ConfigError, match=r"cannot be run without pixels.*pixels=True"):
            next(iter(loader))
