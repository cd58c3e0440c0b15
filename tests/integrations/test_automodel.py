"""NeMo Automodel: the dataset target under the loader that its recipes build, and the recipe itself."""

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoProcessor

from vlm_stream import StreamLoader
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.integrations.automodel import PackedRows, StreamDataset
from vlm_stream.testing import build_tiny_model

# torchdata calls a function that torch 2.13 has deprecated, at the construction of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

ROOT = Path(__file__).parents[2]
AUTOMODEL = ROOT / ".venv-automodel" / "bin" / "python"
OPTIONS = {"pack_size": 1024, "with_refs": True}


def recipe_loader(config, rank=0, world_size=1, *, rows=1, shuffle=True, num_workers=0):
    """The loader as `VlmDataloaderConfig.build` of nemo_automodel 0.7.0 makes it."""
    dataset = config.build(rank=rank, world_size=world_size)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    return StatefulDataLoader(
        dataset=dataset,
        sampler=sampler,
        collate_fn=dataset.robust_collate(None),
        batch_size=rows,
        num_workers=num_workers,
    )


def take(loader, epoch=0, count=None):
    """Batches of an epoch, which begins as the recipe's step scheduler begins it."""
    loader.sampler.set_epoch(epoch)
    return list(itertools.islice(loader, count))


def keys(batches):
    return [name[2] for batch in batches for row in batch["refs"] for name in row]


@pytest.fixture
def dataset(toy_shards, saved_processor):
    def make(**changes):
        return StreamDataset(sources=str(toy_shards), processor=str(saved_processor), **{"options": OPTIONS} | changes)

    return make


@pytest.fixture
def own(toy_shards, processor):
    """Our own loop, with the same collation."""

    def make(rank=0, world_size=1, **changes):
        collate = PackedRows(packed_as="block_causal", pack_size=1024)
        options = OPTIONS | {"collate_fn": collate} | changes
        return StreamLoader(toy_shards, processor=processor, rank=rank, world_size=world_size, **options)

    return make


def assert_equal(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert set(one) == set(other) - {"num_items_in_batch"}
        for key, value in one.items():
            assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_rank_gets_the_batches_of_our_own_loop_epoch_by_epoch(dataset, own, shuffle):
    for rank in range(2):
        loader = recipe_loader(dataset(), rank, 2, shuffle=shuffle)
        want = own(rank, 2)
        for epoch in range(2):
            batches = list(want)
            assert_equal(take(loader, epoch), batches)
            assert len(loader) == len(batches)


def test_accumulation_follows_the_global_batch(dataset, own):
    loader = recipe_loader(dataset(local_batch_size=2, global_batch_size=8), 1, 2, rows=2)
    want = own(1, 2, batch_size=2, micro_batches=2)
    assert_equal(take(loader), list(want))
    assert len(loader) % 2 == 0


def test_a_resume_loses_and_repeats_nothing_wherever_it_was_saved(dataset):
    whole = recipe_loader(dataset())
    want = keys(take(whole, 0) + take(whole, 1))
    num_batches = len(whole)
    for saved_after in (0, 1, num_batches - 1, num_batches, num_batches + 2):
        loader = recipe_loader(dataset())
        done = take(loader, 0, saved_after)
        if saved_after > num_batches:
            done += take(loader, 1, saved_after - num_batches)
        state = loader.state_dict()
        again = recipe_loader(dataset())
        again.load_state_dict(state)
        rest = [batch for epoch in range(saved_after > num_batches, 2) for batch in take(again, epoch)]
        assert keys(done + rest) == want, saved_after


def test_fewer_ranks_go_on_with_what_is_left_of_the_epoch(dataset):
    loaders = [recipe_loader(dataset(), rank, 2) for rank in range(2)]
    done = [batch for loader in loaders for batch in take(loader, 0, 3)]
    states = [loader.state_dict() for loader in loaders]
    assert states[0]["dataset_state"] == states[1]["dataset_state"]
    alone = recipe_loader(dataset())
    alone.load_state_dict(states[0])
    rest = take(alone, 0)
    epoch = keys(take(recipe_loader(dataset())))
    assert sorted(keys(done + rest)) == sorted(epoch)
    assert sorted(keys(take(alone, 1))) == sorted(epoch)


def test_more_ranks_go_on_where_the_others_stopped(dataset):
    """The recipe's sampler ends before the stream's epoch does: the rest comes first in the next."""
    before = recipe_loader(dataset())
    done = take(before, 0, 4)
    loaders = [recipe_loader(dataset(), rank, 2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(before.state_dict())
    rest = [batch for epoch in range(3) for loader in loaders for batch in take(loader, epoch)]
    seen = keys(done + rest)
    epoch = keys(take(recipe_loader(dataset())))
    assert min(seen.count(key) for key in epoch) >= 2
    assert max(seen.count(key) for key in epoch) <= 3


def test_every_evaluation_begins_at_the_beginning(dataset):
    loader = recipe_loader(dataset(options=OPTIONS | {"train": False}))
    first = keys(loader)
    assert len(set(first)) == 60
    assert keys(itertools.islice(loader, 2)) == keys(itertools.islice(loader, 2))  # broken off
    assert keys(loader) == first


def test_rows_that_are_not_packed_have_shifted_labels(dataset, toy_shards, processor):
    options = {"mode": "grouped", "with_refs": True}
    batches = take(recipe_loader(dataset(local_batch_size=2, options=options), rows=2))
    want = list(StreamLoader(toy_shards, processor=processor, batch_size=2, hf_labels=False, **options))
    assert_equal(batches, want)
    assert all(batch["pixel_values"].dtype == torch.bfloat16 for batch in batches if "pixel_values" in batch)


def test_rows_with_a_hidden_image_have_the_positions_of_their_family(dataset, toy_shards, processor):
    """A model that computes positions itself gives the grid of a hidden image to the next row."""
    options = {"mode": "plain", "fake_image": True, "with_refs": True}
    batches = take(recipe_loader(dataset(local_batch_size=4, options=options), rows=4))
    want = StreamLoader(toy_shards, processor=processor, batch_size=4, **options)
    for batch, other in zip(batches, want, strict=True):
        assert batch["refs"] == other["refs"]
        assert torch.equal(batch["position_ids"], other["position_ids"][..., :-1])


def test_documents_of_a_row_train_as_if_each_were_alone(own, processor):
    batch = next(iter(own(batch_size=2)))
    model = build_tiny_model("qwen2_5_vl", processor).eval()
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "refs")}
    documents, ids = batch["_packed_seq_ids"], batch["input_ids"]
    assert documents.max() > 1
    with torch.no_grad():
        packed = model(**inputs | {"pixel_values": batch["pixel_values"].float()}).logits
    image = int(batch["n_images_per_sample"][0])
    first = documents[0] == 1
    num_patches = batch["image_grid_thw"].prod(dim=1).cumsum(0)
    images = int((batch["mm_token_type_ids"][0, first].diff(prepend=torch.zeros(1).long()) == 1).sum())
    media = {}
    if images:
        assert images <= image
        media = {
            "pixel_values": batch["pixel_values"][: num_patches[images - 1]].float(),
            "image_grid_thw": batch["image_grid_thw"][:images],
        }
    with torch.no_grad():
        alone = model(input_ids=ids[:1, first], mm_token_type_ids=batch["mm_token_type_ids"][:1, first], **media).logits
    assert torch.allclose(packed[0, first], alone[0], atol=1e-5)
    shown = batch["labels"][0, first] != -100
    assert torch.equal(batch["labels"][0, first][:-1][shown[:-1]], ids[0, first][1:][shown[:-1]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packed_as": "block-causal"}, "packed_as is 'block-causal'; did you mean 'block_causal'"),
        (
            {"options": {"pack_size": 9, "batch_size": 2}},
            "dataset.options has batch_size, which the recipe or another field",
        ),
        ({"options": {"pack_size": 9, "micro_batches": 2}, "global_batch_size": 4}, "both say what an optimizer step"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(dataset, changes, words):
    with pytest.raises(ConfigError, match=words):
        dataset(**changes)


def test_a_global_batch_that_ranks_cannot_share_is_refused(dataset):
    with pytest.raises(ConfigError, match="global_batch_size 5 is no multiple of 1 rows on each of 2 ranks"):
        dataset(global_batch_size=5).build(rank=0, world_size=2)


def test_an_endless_stream_is_refused(dataset):
    with pytest.raises(ConfigError, match="recipe wants to know how long an epoch is"):
        dataset(options=OPTIONS | {"epochs": None}).build(rank=0, world_size=1)


def test_a_recipe_that_asks_for_other_rows_is_refused(dataset):
    with pytest.raises(ConfigError, match=r"wants 2 rows a batch .* and the stream makes 1"):
        take(recipe_loader(dataset(), rows=2))
    with pytest.raises(ConfigError, match="num_workers=1, and each of them would read the whole stream"):
        take(recipe_loader(dataset(), num_workers=1))
    with pytest.raises(ConfigError, match="rows were asked for one by one"):
        dataset().build(rank=0, world_size=1)[0]


def test_a_state_of_another_dataset_is_refused(dataset):
    with pytest.raises(StateError, match="has no taken and taken_of_round, so it was not saved by this dataset"):
        dataset().build(rank=0, world_size=1).load_state_dict({})


needs_automodel = pytest.mark.skipif(
    not AUTOMODEL.exists(), reason="nemo-automodel has an environment of its own: make automodel-setup"
)


@pytest.fixture(scope="module")
def model_data(conformance_data):
    """The data of conformance with a model that the recipe can load."""
    folder = conformance_data / "model"
    processor = AutoProcessor.from_pretrained(conformance_data / "processor")
    processor.save_pretrained(folder)
    build_tiny_model("qwen2_5_vl", processor).save_pretrained(folder)
    return conformance_data


def run_in_automodel(module, *arguments):
    """Run a module of these tests in that environment; return what it wrote into the file that is its last argument."""
    finished = subprocess.run(
        [AUTOMODEL, "-m", f"tests.integrations.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert not finished.returncode, finished.stderr[-6000:]
    return json.loads(Path(arguments[-1]).read_text())


@needs_automodel
@pytest.mark.trainers
def test_packed_batches_equal_those_of_its_own_collation(model_data, tmp_path):
    found = run_in_automodel("automodel_forms", model_data / "shards", model_data / "model", tmp_path / "out.json")
    assert found["differences"] == []
    assert found["compared"] > 200


@needs_automodel
@pytest.mark.trainers
def test_the_recipe_conforms(model_data, tmp_path):
    results = run_in_automodel("automodel_trainer", model_data, tmp_path / "check", tmp_path / "out.json")
    assert results.pop("ranks with gradients") == [0, 1]
    assert set(results.values()) == {"yes"}
