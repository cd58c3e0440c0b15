"""What a batch holds: the planned tokens, labels that the model shifts once, holes where samples are bad."""

import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.errors import BadBudgetError, ConfigError, DatasetError, StateError
from vlm_stream.options import StreamOptions
from vlm_stream.testing import build_tiny_model


@pytest.fixture(scope="module")
def model(processor):
    return build_tiny_model("qwen2_5_vl", processor)


@pytest.mark.parametrize("mode", [{"pack_size": 1024}, {"mode": "plain", "batch_size": 3}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_models_loss_is_the_one_computed_by_hand(toy_shards, processor, model, mode, attention):
    model.set_attn_implementation(attention)
    for _, batch in zip(range(4), StreamLoader(toy_shards, processor=processor, **mode), strict=False):
        out = model(**batch, use_cache=False)
        by_hand = cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        assert torch.isfinite(out.loss)
        assert out.loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_padded_rows_with_fake_images_train_as_without(toy_shards, processor, model):
    options = {"mode": "plain", "batch_size": 4, "shuffle": False, "model_config": model.config}
    plain, faked = (
        list(StreamLoader(toy_shards, processor=processor, fake_image=fake, **options)) for fake in (False, True)
    )
    text_only = [number for number, batch in enumerate(plain) if not batch["mm_token_type_ids"].any(dim=1).all()]
    assert text_only
    for number in text_only[:3]:
        losses = [model(**batches[number], use_cache=False).loss.item() for batches in (plain, faked)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_packed_batch_trains(toy_shards, processor, model):
    batch = next(iter(StreamLoader(toy_shards, processor=processor, pack_size=1024)))
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0


def test_rows_hold_exactly_the_planned_tokens(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024))
    for _, delivery in stream.deliveries():
        assert not delivery.bad
        assert delivery.num_tokens == delivery.num_planned_tokens


def test_torchs_own_loader_gives_the_same_batches(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024))
    expected = [batch["input_ids"] for batch in stream]
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    assert all(torch.equal(batch["input_ids"], ids) for batch, ids in zip(loader, expected, strict=True))


@pytest.fixture
def damaged_shards(toy_shards, tmp_path):
    """A copy of the dataset with one flipped byte in the middle of a sample."""
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    shard = folder / "shard-000002.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 0xFF
    shard.write_bytes(data)
    return folder


@pytest.mark.parametrize("mode", [{"pack_size": 1024}, {"mode": "plain"}])
def test_a_bad_sample_is_a_hole_and_shifts_nothing(toy_shards, damaged_shards, processor, mode):
    whole = list(StreamLoader(toy_shards, processor=processor, with_refs=True, **mode))
    loader = StreamLoader(damaged_shards, processor=processor, with_refs=True, **mode)
    damaged = list(loader)
    (bad,) = loader.ledger.newest
    assert (bad.stage, bad.reason, bad.shard) == ("read", "crc_mismatch", "shard-000002.tar")
    assert bad.offset == 0
    name = (bad.source, bad.shard, bad.sample, bad.entry, bad.id)
    assert (bad.entry, bad.id) == ("captions", "caption-20")
    expected = [[[n for n in row if n != name] for row in batch["refs"]] for batch in whole]
    assert [batch["refs"] for batch in damaged] == expected


def test_a_batch_without_labels_has_a_loss_of_zero(toy_shards, processor, model):
    loaders = [
        StreamLoader(toy_shards, processor=processor, mode="plain", rank=rank, world_size=59) for rank in range(59)
    ]
    last = list(loaders[-1])[-1]  # 60 samples on 59 ranks: the second step has one sample and 58 fillers
    assert not (last["labels"] != -100).any()
    assert model(**last, use_cache=False).loss.item() == 0.0


def test_too_many_bad_samples_end_the_run(damaged_shards, processor):
    for shard in damaged_shards.glob("*.tar"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(BadBudgetError, match=r"(?s)10 of \d+ samples were bad.*crc_mismatch"):
        list(StreamLoader(damaged_shards, processor=processor, pack_size=1024))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "mode='packed' without pack_size"),
        ({"pack_size": 0}, "pack_size is 0, but it counts something"),
        ({"mode": "paked"}, "mode is 'paked'; did you mean 'packed'"),
        ({"pack_sise": 12}, "there is no option 'pack_sise'; did you mean 'pack_size'"),
        ({"pack_size": 12, "bad_budget": 2}, "bad_budget is 2.0, but it is a share"),
        ({"pack_size": 12, "packing_ratio": 0}, "packing_ratio=0.0 is no share of a row"),
        ({"pack_size": 12, "packing_ratio": float("nan")}, "packing_ratio=nan is no share of a row"),
        ({"pack_size": 12, "packing_ratio": 0.01}, "packing_ratio=0.01 leaves a capacity of 0 tokens in a row of 12"),
        ({"pack_size": 12, "rank": 3, "world_size": 2}, "rank 3 of 2 does not exist"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(processor, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        StreamLoader("nowhere", processor=processor, **options)


def test_a_folder_without_a_dataset_is_refused(tmp_path, processor):
    with pytest.raises(DatasetError, match=r"has no dataset\.json"):
        next(iter(StreamLoader(tmp_path, processor=processor, pack_size=1024)))


def test_a_state_of_something_else_is_refused(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024)
    with pytest.raises(StateError, match="not the state of a StreamLoader"):
        loader.load_state_dict({"model": 1})
    next(iter(loader))
    other = StreamLoader(toy_shards, processor=processor, pack_size=1024, seed=1)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="seed"):
        next(iter(other))


def test_a_processor_that_cannot_be_loaded_is_refused(toy_shards, tmp_path):
    with pytest.raises(ConfigError, match=r"the processor .* cannot be loaded"):
        next(iter(StreamLoader(toy_shards, processor=tmp_path / "nothing", pack_size=1024)))
