"""The loader as trainers use it: epochs, mixtures, dead workers, damaged data, metrics, other people's loaders."""

import json
import logging
import os
import shutil
import signal

import pytest
import torch
from torch.utils.data import DataLoader

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.collate import pad_collate_fn
from vlm_stream.errors import ConfigError, DatasetError, StateError
from vlm_stream.options import StreamOptions
from vlm_stream.testing import build_tiny_model

PACKED = {"pack_size": 1024, "with_refs": True}


def keys(batches):
    return [name[2] for batch in batches for row in batch["refs"] for name in row]


def ids(batches):
    return [batch["input_ids"] for batch in batches]


def equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_iterating_again_delivers_the_next_epoch(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    first = keys(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    second = keys(loader)
    assert sorted(first) == sorted(second)
    assert first != second
    resumed = StreamLoader(toy_shards, processor=processor, **PACKED)
    resumed.load_state_dict(state)
    assert keys(resumed) == second


def test_evaluation_is_in_order_and_complete(toy_shards, processor):
    loaders = [
        StreamLoader(
            toy_shards,
            processor=processor,
            train=False,
            mode="plain",
            batch_size=4,
            with_refs=True,
            barrier="none",
            rank=rank,
            world_size=2,
        )
        for rank in range(2)
    ]
    both = [list(loader) for loader in loaders]
    assert len(both[0]) == len(both[1])
    delivered = [key for pair in zip(*both, strict=True) for key in keys(pair)]
    assert delivered == sorted(delivered)
    assert len(delivered) == 60


def test_a_mixture_follows_its_weights(toy_shards, image_shards, processor):
    sources = {"a": {"url": toy_shards, "weight": 3}, "b": {"url": image_shards, "weight": 1}}
    loader = StreamLoader(sources, processor=processor, mode="plain", with_refs=True, bad_budget=None)
    names = [name[0] for batch in loader for row in batch["refs"] for name in row]
    assert names.count("a") == 60  # the first source to finish ends the epoch
    assert names.count("b") == pytest.approx(20, abs=1)


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_lost_worker_changes_nothing_but_one_warning(toy_shards, processor, caplog, how):
    expected = ids(StreamLoader(toy_shards, processor=processor, **PACKED))
    loader = StreamLoader(toy_shards, processor=processor, num_workers=2, worker_timeout=20.0, **PACKED)
    batches = []
    with caplog.at_level(logging.WARNING, logger="vlm_stream"):
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                os.kill(loader.worker_pids()[0], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    assert equal(ids(batches), expected)
    deaths = [record for record in caplog.records if "died (SIGKILL" in record.getMessage()]
    assert len(deaths) == (how == "kill")  # one that hangs may be given up, or all be done before


@pytest.fixture
def damage(toy_shards, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    return folder


def cut_shard(folder):
    shard = folder / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:20_000])


def remove_shard(folder):
    (folder / "shard-000001.tar").unlink()


def flip_byte(folder, at=600):
    shard = folder / "shard-000001.tar"
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)


def flip_header(folder):
    flip_byte(folder, at=150)  # the first member's tar header is bytes 0..511


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut_shard, "truncated"),
        (remove_shard, "missing_shard"),
        (flip_byte, "crc_mismatch"),
        (flip_header, "crc_mismatch"),
    ],
)
def test_damage_leaves_holes_and_the_same_steps_on_every_rank(toy_shards, damage, processor, harm, reason):
    harm(damage)
    counts, lost = set(), {}
    for num_workers in (0, 1):
        seen = []
        for rank in range(2):
            loader = StreamLoader(
                damage, processor=processor, rank=rank, world_size=2, num_workers=num_workers, bad_budget=None, **PACKED
            )
            batches = list(loader)
            counts.add(len(batches))
            seen += keys(batches)
            lost.update({bad.sample: bad.reason for bad in loader.ledger.newest})
        assert len(seen) == len(set(seen)) == 60 - len(lost)
    assert len(counts) == 1
    assert set(lost.values()) == {reason}
    if harm in (flip_byte, flip_header):
        assert len(lost) == 1  # the damage, and nothing behind it
    whole = StreamLoader(toy_shards, processor=processor, rank=0, world_size=2, **PACKED)
    assert counts == {len(list(whole))}


def test_an_overlong_sample_is_named(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, pack_size=400, with_refs=True, bad_budget=None)
    seen = keys(loader)
    assert 0 < len(seen) < 60
    assert len(seen) + loader.ledger.num_bad == 60
    assert set(loader.ledger.by_reason()) == {"fit: too_long"}


def test_labels_in_the_references_form_are_shifted_once(toy_shards, processor):
    plain = {"mode": "plain", "shuffle": False, "batch_size": 2}
    ready = next(iter(StreamLoader(toy_shards, processor=processor, **plain)))
    shifted = next(iter(StreamLoader(toy_shards, processor=processor, hf_labels=False, **plain)))
    assert torch.equal(shifted["labels"], ready["labels"][:, 1:])
    assert torch.equal(shifted["input_ids"], ready["input_ids"][:, :-1])
    packed = {"pack_size": 1024, "shuffle": False}
    ready = next(iter(StreamLoader(toy_shards, processor=processor, **packed)))
    shifted = next(iter(StreamLoader(toy_shards, processor=processor, hf_labels=False, **packed)))
    assert torch.equal(shifted["labels"][:, :-1], ready["labels"][:, 1:])


def test_a_collate_function_of_the_users(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, mode="plain", batch_size=2, collate_fn=pad_collate_fn)
    assert next(iter(loader))["pixel_values"].dtype == torch.bfloat16


def test_an_invisible_image_is_planned_for(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024, fake_image=True))
    deliveries = [delivery for _, delivery in stream.deliveries()]
    assert all(not delivery.bad for delivery in deliveries)
    assert all(delivery.num_tokens == delivery.num_planned_tokens for delivery in deliveries)
    assert all("pixel_values" in delivery.batch or "pixel_values_videos" in delivery.batch for delivery in deliveries)


def test_a_replay_is_the_batch_itself(toy_shards, processor):
    options = StreamOptions(pack_size=1024, micro_batches=2, with_refs=True)
    stream = VLMStream(toy_shards, processor=processor, options=options, rank=1, world_size=2)
    pairs = list(stream.deliveries())
    middle = pairs[len(pairs) // 2][1].name.step
    wanted = [delivery.batch["input_ids"] for _, delivery in pairs if delivery.name.step == middle]
    assert equal([delivery.batch["input_ids"] for delivery in stream.replay(middle)], wanted)
    assert equal([d.batch["input_ids"] for d in stream.replay(middle, pairs[0][0].state())], wanted)


def test_a_resume_reads_no_sample_that_is_not_delivered(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024))
    whole = list(stream.deliveries())
    middle = len(whole) // 2
    rest = [delivery for _, delivery in stream.deliveries(whole[middle][0].state())]
    assert [delivery.name for delivery in rest] == [delivery.name for _, delivery in whole[middle + 1 :]]
    assert rest[0].reads.samples == rest[0].num_samples
    assert rest[-1].reads.samples == sum(delivery.num_samples for delivery in rest)


def test_metrics_add_up(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, num_workers=1, **PACKED)
    batches = list(loader)
    numbers = loader.metrics()
    assert numbers["batches"] == len(batches)
    assert numbers["samples"] == 60
    assert numbers["tokens"] == sum(batch["input_ids"].numel() for batch in batches)
    assert 0.9 < numbers["fill"] <= 1
    assert numbers["padding"] == 0
    assert numbers["resident_megabytes"] > 10


def test_prometheus_serves_them(toy_shards, processor):
    from urllib.request import urlopen

    loader = StreamLoader(toy_shards, processor=processor, num_workers=1, **PACKED)
    batches = iter(loader)
    next(batches)
    server, thread = loader.serve_metrics(0)
    try:
        text = urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
        with pytest.raises(ConfigError, match=rf"cannot be served at .*:{server.server_port} \(Address already"):
            loader.serve_metrics(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "vlm_stream_batches 1.0" in text
    for name in ("built", "failed", "hedged", "waited_s", "bytes", "queued"):
        assert f'vlm_stream_builder_{name}{{builder="0",kind="usual",node="localhost"}}' in text
    assert loader.builders()[0]["waited_s"] > 0  # for the first batch
    assert loader.metrics()["waited_s"] > 0
    loader.close()
    assert loader.metrics()["bytes_built"] > 0


def test_distributed_checkpoint_takes_it_for_stateful(toy_shards, processor):
    from torch.distributed.checkpoint.stateful import Stateful

    assert isinstance(StreamLoader(toy_shards, processor=processor, **PACKED), Stateful)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_stateful_loader_resumes_it(toy_shards, processor, num_workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024))
        return StatefulDataLoader(stream, batch_size=None, num_workers=num_workers)

    expected = ids(make())
    loader, seen = make(), []
    for batch in loader:
        seen.append(batch["input_ids"])
        if len(seen) == 4:
            break
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert equal(seen + ids(resumed), expected)


def test_the_trainer_of_transformers_takes_it(toy_shards, processor, tmp_path):
    from transformers import Trainer, TrainingArguments

    class Streamed(Trainer):
        def get_train_dataloader(self):
            return loader

    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024, epochs=None)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to=[], use_cpu=True, logging_steps=1, save_strategy="no"
    )
    model = build_tiny_model("qwen2_5_vl", processor)
    model.config.use_cache = False
    trainer = Streamed(model=model, args=arguments)
    result = trainer.train()
    assert result.global_step == 3
    assert result.training_loss > 0


def test_accelerate_cannot_cut_the_batches_of_a_bare_stream(toy_shards, processor):
    from accelerate import Accelerator

    stream = VLMStream(toy_shards, processor=processor, pack_size=1024)
    prepared = Accelerator(cpu=True).prepare(DataLoader(stream, batch_size=None))
    with pytest.raises(ConfigError, match="accelerate deals the batches of an IterableDataset out to all"):
        next(iter(prepared))


def test_a_state_of_another_dataset_is_refused(toy_shards, image_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    next(iter(loader))
    other = StreamLoader(image_shards, processor=processor, **PACKED)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="source 'data' has other shards, indexes or another sample_ratio"):
        next(iter(other))


def test_rows_smaller_than_any_sample_are_refused(toy_shards, processor):
    with pytest.raises(DatasetError, match=r"not one of the samples .* fits .*pack_size=8"):
        list(StreamLoader(toy_shards, processor=processor, pack_size=8, bad_budget=None))


def test_a_world_larger_than_the_data_gets_fillers(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, rank=70, world_size=80, mode="plain", with_refs=True)
    (batch,) = list(loader)
    assert keys([batch]) == []
    assert not (batch["labels"] != -100).any()


def test_no_workers_at_all_is_refused(toy_shards, processor):
    with pytest.raises(ConfigError, match="num_workers is -1, but it counts something"):
        StreamLoader(toy_shards, processor=processor, num_workers=-1, **PACKED)
