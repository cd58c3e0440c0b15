"""`num_items_in_batch`: the labels of the whole step, in each of its batches; nothing where nobody knows."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections import defaultdict

import pytest
import torch

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.convert import recount
from vlm_stream.errors import ConfigError
from vlm_stream.format import load_manifest
from vlm_stream.integrations.torch import count_items
from vlm_stream.storage import open_store
from vlm_stream.testing import build_processor, build_tiny_model

MODES = {
    "packed": {"pack_size": 1024},
    "packed, not shifted here": {"pack_size": 1024, "hf_labels": False},
    "grouped": {"mode": "grouped", "batch_size": 3},
    "budget": {"mode": "grouped", "token_budget": 3000},
    "plain": {"mode": "plain", "batch_size": 3},
    "plain, shifted": {"mode": "plain", "batch_size": 3, "hf_labels": False},
    "fake images": {"pack_size": 1024, "fake_image": True},
}
UNKNOWN = "how many labels step .* is not known"


def labels_of(batch) -> int:
    return int((batch["labels"] != -100).sum())


def deliveries_by_step(shards, processor, world, **options):
    """Return what all ranks get, step by step."""
    steps = defaultdict(list)
    for rank in range(world):
        stream = VLMStream(shards, processor=processor, rank=rank, world_size=world, **options)
        for _, delivery in stream.deliveries():
            steps[delivery.name.step].append(delivery)
    return steps


@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_batch_of_a_step_says_how_many_labels_the_step_has(toy_shards, processor, mode):
    options = MODES[mode] | {"micro_batches": 2}
    for deliveries in deliveries_by_step(toy_shards, processor, 3, **options).values():
        assert len(deliveries) == 6
        total = sum(labels_of(delivery.batch) for delivery in deliveries)
        for delivery in deliveries:
            count = delivery.batch["num_items_in_batch"]
            assert (count.dtype, count.shape, count.item()) == (torch.long, (), total)
            assert delivery.num_labels == delivery.num_planned_labels == labels_of(delivery.batch)
            assert delivery.num_step_labels == total


def test_workers_and_loaders_give_the_same_counts(toy_shards, processor):
    options = {"pack_size": 1024, "micro_batches": 2}
    one, two = (StreamLoader(toy_shards, processor=processor, num_workers=n, **options) for n in (0, 2))
    counts = [[int(batch["num_items_in_batch"]) for batch in loader] for loader in (one, two)]
    assert counts[0] == counts[1]
    assert one.metrics()["labels"] == one.metrics()["planned_labels"] == sum(counts[0]) / 2
    assert load_manifest(open_store(str(toy_shards))).totals.label_tokens == sum(counts[0]) / 2


@pytest.mark.parametrize("mode", [{"pack_size": 1024}, {"mode": "plain"}, {"mode": "plain", "hf_labels": False}])
def test_a_batch_without_labels_is_divided_by_the_count_of_its_step(toy_shards, processor, mode):
    """It has a loss of 0 either way; the others of its step must not see a 1."""
    steps = deliveries_by_step(toy_shards, processor, 59, **mode)
    last = steps[max(steps)]
    empty = [delivery for delivery in last if not delivery.num_labels]
    assert empty
    assert {int(d.batch["num_items_in_batch"]) for d in last} == {sum(d.num_labels for d in last)}


def test_a_step_without_any_labels_counts_one(toy_shards, processor, tmp_path):
    """A count of 0 would make its loss NaN."""
    stream = VLMStream(toy_shards, processor=processor, mode="plain", rank=0, world_size=1)
    from vlm_stream.build.delivery import add_item_count

    batch = next(stream.deliveries())[1].batch
    batch["labels"].fill_(-100)
    del batch["num_items_in_batch"]
    add_item_count(batch, 0, 0)
    assert int(batch["num_items_in_batch"]) == 1
    model = build_tiny_model("qwen2_5_vl", processor)
    assert model(**batch, use_cache=False).loss.item() == 0.0


@pytest.fixture
def uncounted(toy_shards, tmp_path):
    folder = tmp_path / "uncounted"
    shutil.copytree(toy_shards, folder)
    recount(str(folder), None)
    return folder


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "labels step" in record.getMessage()]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_not_counted_is_said_once_with_the_ways_out(uncounted, processor, caplog, workers):
    loader = StreamLoader(
        uncounted, processor=processor, mode="plain", batch_size=3, micro_batches=2, num_workers=workers
    )
    with caplog.at_level(logging.WARNING):
        batches = list(loader) + list(loader)
    assert not any("num_items_in_batch" in batch for batch in batches if labels_of(batch))
    (said,) = warnings_of(caplog)
    assert "how many labels step 0 has over its 2 micro-batches is not known" in said
    assert "vlm-stream recount" in said
    assert "vlm_stream.integrations.torch.count_items(batches)" in said
    metrics = loader.metrics()
    assert metrics["labels"] == metrics["planned_labels"] == sum(map(labels_of, batches))


def test_a_stream_says_it_too_and_other_ranks_do_not(uncounted, processor, caplog):
    for rank in range(2):
        for _ in VLMStream(uncounted, processor=processor, mode="plain", batch_size=3, rank=rank, world_size=2):
            pass
    assert len(warnings_of(caplog)) == 1


def test_nobody_needs_the_count_of_a_step_that_is_one_batch(uncounted, processor, caplog):
    batches = list(StreamLoader(uncounted, processor=processor, mode="plain", batch_size=3))
    assert not any("num_items_in_batch" in batch for batch in batches)
    assert not warnings_of(caplog)


def test_evaluation_says_nothing(uncounted, processor, caplog):
    for _ in StreamLoader(uncounted, processor=processor, mode="plain", batch_size=3, micro_batches=2, train=False):
        pass
    assert not warnings_of(caplog)


def test_counts_for_another_template_are_not_believed(toy_shards, processor, caplog):
    template = processor.chat_template.replace("You are a helpful assistant.", "You are of great help.")
    assert template != processor.chat_template
    limits = {"size": dict(processor.image_processor.size)}
    other = build_processor("qwen2_5_vl", chat_template=template, image=limits)
    batches = list(StreamLoader(toy_shards, processor=other, pack_size=1024, micro_batches=2))
    assert not any("num_items_in_batch" in batch for batch in batches if labels_of(batch))
    assert len(warnings_of(caplog)) == 1


def test_steps_with_a_cut_sample_are_unknown(toy_shards, processor, caplog):
    options = {"mode": "plain", "max_length": 150, "long_samples": "truncate", "bad_budget": None}
    loader = StreamLoader(toy_shards, processor=processor, micro_batches=2, **options)
    known = 0
    for first, second in itertools.batched(loader, 2) if hasattr(itertools, "batched") else _pairs(loader):
        if "num_items_in_batch" in first and labels_of(first):
            assert int(first["num_items_in_batch"]) >= labels_of(first) + labels_of(second)
            known += 1
    assert known
    assert len(warnings_of(caplog)) == 1


def _pairs(loader):
    batches = iter(loader)
    return zip(batches, batches, strict=True)


def test_raw_samples_have_no_count(toy_shards):
    for batch in itertools.islice(StreamLoader(toy_shards, processor=None, pack_size=1024, micro_batches=2), 3):
        assert "num_items_in_batch" not in batch


def collate_with_labels(rows, processor):
    return {"labels": torch.cat([sample["labels"] for row in rows for sample in row])}


def collate_without_labels(rows, processor):
    return {"samples": len(rows)}


def collate_with_own_count(rows, processor):
    return collate_with_labels(rows, processor) | {"num_items_in_batch": torch.tensor(7)}


def test_a_collate_fn_gets_the_count_where_it_returns_labels(toy_shards, processor):
    def first(function):
        options = {"pack_size": 1024, "micro_batches": 2, "collate_fn": function}
        loader = StreamLoader(toy_shards, processor=processor, **options)
        return list(itertools.islice(loader, 2))

    batches = first(collate_with_labels)
    assert [int(batch["num_items_in_batch"]) for batch in batches] == [sum(map(labels_of, batches))] * 2
    assert all("num_items_in_batch" not in batch for batch in first(collate_without_labels))
    assert [int(batch["num_items_in_batch"]) for batch in first(collate_with_own_count)] == [7, 7]


def test_holes_show_as_the_difference_of_planned_and_delivered_labels(toy_shards, processor, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    shard = folder / "shard-000002.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 0xFF
    shard.write_bytes(data)
    options = {"processor": processor, "pack_size": 1024, "micro_batches": 2}
    whole, damaged = StreamLoader(toy_shards, **options), StreamLoader(folder, **options)
    counts = [[int(batch["num_items_in_batch"]) for batch in loader] for loader in (whole, damaged)]
    assert counts[0] == counts[1]  # what was planned: no rank can know of another's holes
    assert len(damaged.ledger.newest) == 1
    first, second = whole.metrics(), damaged.metrics()
    assert first["labels"] == first["planned_labels"] == second["planned_labels"]
    assert 0 < second["planned_labels"] - second["labels"] < 200


def test_a_resume_inside_a_step_goes_on_with_its_count(toy_shards, processor):
    options = {"processor": processor, "pack_size": 1024, "micro_batches": 4}
    loader = StreamLoader(toy_shards, **options)
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    rest = [next(batches) for _ in range(2)]
    again = StreamLoader(toy_shards, **options)
    again.load_state_dict(state)
    for batch, expected in zip(again, rest, strict=False):
        assert int(batch["num_items_in_batch"]) == int(expected["num_items_in_batch"])
    assert int(rest[0]["num_items_in_batch"]) == sum(map(labels_of, first + rest))
    other = StreamLoader(toy_shards, **(options | {"micro_batches": 3}))
    other.load_state_dict(state)
    anew = list(itertools.islice(other, 3))
    assert {int(batch["num_items_in_batch"]) for batch in anew} == {sum(map(labels_of, anew))}


def test_count_items_adds_up_what_is_there(uncounted, processor):
    loader = StreamLoader(uncounted, processor=processor, mode="plain", batch_size=3, micro_batches=2)
    batches = list(itertools.islice(loader, 2))
    count = count_items(batches)
    assert (count.dtype, count.shape, int(count)) == (torch.long, (), sum(map(labels_of, batches)))
    assert int(count_items([{"labels": torch.full((2, 3), -100)}])) == 1
    for given in ([], [{"input_ids": 1}], [batches[0], {}]):
        with pytest.raises(ConfigError, match=r"of \d batches \d have labels, so the labels of the step cannot be"):
            count_items(given)
