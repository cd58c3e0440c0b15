"""The loader at its edge: length, evaluation, iterators that are left, lists of datasets, the end of a script."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.waiting import wait_for
from vlm_stream import Batch, StreamLoader, StreamOptions, VLMStream
from vlm_stream.convert import make_shards
from vlm_stream.errors import BadBudgetError, ConfigError

PACKED = {"pack_size": 1024, "with_refs": True}
MODES = {
    "packed": {"pack_size": 1024, "micro_batches": 2},
    "grouped": {"mode": "grouped", "batch_size": 3},
    "budget": {"mode": "grouped", "token_budget": 1500},
    "plain": {"mode": "plain", "batch_size": 4, "micro_batches": 3},
}


def keys(batches):
    return [name[2] for batch in batches for row in batch["refs"] for name in row]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
def test_the_length_is_the_number_of_batches_in_every_round(toy_shards, processor, mode, rank, world_size):
    loader = StreamLoader(
        toy_shards, processor=processor, rank=rank, world_size=world_size, window=16, **MODES[mode], bad_budget=None
    )
    assert loader.count_batches(2)[0] == len(loader) == loader.batches_left
    for _ in range(2):
        expected = len(loader)
        for number, _ in enumerate(loader, start=1):
            assert len(loader) == expected
            assert loader.batches_left == expected - number
        assert number == expected


def test_a_resume_does_not_change_the_length(toy_shards, processor):
    make = {"processor": processor, "window": 16, "micro_batches": 2, **PACKED}
    loader = StreamLoader(toy_shards, **make)
    num_batches = len(loader)
    for _ in itertools.islice(loader, 3):
        pass
    resumed = StreamLoader(toy_shards, **make)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == num_batches
    assert len(list(resumed)) == num_batches - 3
    other_world = StreamLoader(toy_shards, rank=1, world_size=2, **make)
    other_world.load_state_dict(loader.state_dict())
    left = other_world.batches_left
    assert len(other_world) == 3 + left
    assert len(list(other_world)) == left


def test_the_length_is_planned_once_and_kept_with_the_state(toy_shards, processor, monkeypatch):
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    num_batches = len(loader)
    next(iter(loader))
    resumed = StreamLoader(toy_shards, processor=processor, **PACKED)
    resumed.load_state_dict(loader.state_dict())
    monkeypatch.setattr("vlm_stream.loader.count_rounds", None)  # nothing is counted
    assert len(resumed) == len(loader) == num_batches


def test_an_endless_loader_has_no_length_and_its_epochs_have_steps(toy_shards, processor):
    endless = StreamLoader(toy_shards, processor=processor, epochs=None, micro_batches=2, **PACKED)
    for ask in (lambda: len(endless), lambda: endless.estimate_len(), lambda: endless.count_batches()):
        with pytest.raises(TypeError, match="has no end"):
            ask()
    assert endless
    once = StreamLoader(toy_shards, processor=processor, micro_batches=2, **PACKED)
    assert endless.steps_per_epoch == once.steps_per_epoch == len(once) // 2


@pytest.mark.parametrize("mode", MODES)
def test_the_estimate_is_within_its_error(toy_shards, processor, mode):
    loader = StreamLoader(toy_shards, processor=processor, window=10, **MODES[mode])
    estimate = loader.estimate_len()
    assert abs(estimate.batches - len(loader)) <= estimate.error


def test_a_dataloader_knows_the_length_of_a_stream(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, pack_size=1024)
    loader = DataLoader(stream, batch_size=None)
    assert len(loader) == len(list(loader))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_evaluations_are_alike_also_after_one_that_was_left(toy_shards, processor, epochs, num_workers):
    loader = StreamLoader(
        toy_shards, processor=processor, train=False, epochs=epochs, num_workers=num_workers, **PACKED
    )
    first = keys(loader)
    assert len(first) == len(set(first)) == 60
    assert len(keys(itertools.islice(loader, 2))) < 60
    state = loader.state_dict()
    assert keys(loader) == first
    loader.load_state_dict(state)
    assert keys(loader) == first
    assert len(loader) == len(list(loader))


def test_a_list_of_datasets_delivers_all_of_them(toy_shards, image_shards, processor):
    for sources in ([toy_shards, image_shards], {"a": toy_shards, "b": image_shards}):
        loader = StreamLoader(sources, processor=processor, mode="plain", with_refs=True, bad_budget=None)
        names = [name for batch in loader for row in batch["refs"] for name in row]
        sizes = [
            len(keys(StreamLoader(one, processor=processor, mode="plain", with_refs=True, bad_budget=None)))
            for one in (toy_shards, image_shards)
        ]
        first, second = ("data-0", "data-1") if isinstance(sources, list) else ("a", "b")
        assert [sum(name[0] == source for name in names) for source in (first, second)] == sizes
        half = [name[0] for name in names[: len(names) // 2]]
        assert half.count(first) == pytest.approx(sizes[0] / 2, abs=3)  # mixed, not one behind the other


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_old_iterator_neither_repeats_nor_disturbs(toy_shards, processor, num_workers):
    expected = keys(StreamLoader(toy_shards, processor=processor, **PACKED))
    loader = StreamLoader(toy_shards, processor=processor, num_workers=num_workers, **PACKED)
    old = iter(loader)
    seen = keys([next(old)])
    new = iter(loader)
    seen += keys([next(new)])
    with pytest.raises(RuntimeError, match=r"this iterator over a StreamLoader has ended .*iterated again"):
        next(old)
    del old
    gc.collect()
    assert seen + keys(new) == expected
    assert next(new, None) is None


def test_closing_ends_the_workers_and_keeps_the_place(toy_shards, processor):
    expected = keys(StreamLoader(toy_shards, processor=processor, **PACKED))
    with StreamLoader(toy_shards, processor=processor, num_workers=2, **PACKED) as loader:
        batches = iter(loader)
        seen = keys([next(batches)])
        pids = loader.worker_pids()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RuntimeError, match="has ended"):
        next(batches)
    loader.close()
    assert seen + keys(loader) == expected


def shared_memory_of(pid):
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))


SCRIPT = """
import os
import sys
import time
from vlm_stream import StreamLoader
from vlm_stream.testing import build_processor
if __name__ == "__main__":
    loader = StreamLoader(sys.argv[1], processor=sys.argv[2], pack_size=1024, num_workers=int(sys.argv[3]))
    batches = iter(loader)
    rows = next(batches)["input_ids"].shape[0]
    while len(loader.worker_pids()) < int(sys.argv[3]):
        time.sleep(0.1)
    print(rows, os.getpid(), *loader.worker_pids())
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_script_that_ends_with_an_open_iterator_is_quiet(toy_shards, saved_processor, tmp_path, num_workers):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, script, toy_shards, saved_processor, str(num_workers)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    rows, *pids = result.stdout.split()
    assert (result.returncode, rows, len(pids)) == (0, "1", 1 + num_workers)
    assert "Exception ignored" not in result.stderr
    assert "terminate called" not in result.stderr
    assert "Traceback" not in result.stderr
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    # torch's own manager cleans up behind the script
    wait_for(lambda: not any(list(Path("/dev/shm").glob(f"torch_{pid}_*")) for pid in pids))


def test_the_state_stays_before_a_batch_that_broke_the_budget(toy_meta, saved_processor, processor, tmp_path):
    make_shards(toy_meta, tmp_path / "s", processor=str(saved_processor), samples_per_shard=30)
    shard = tmp_path / "s" / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    options = {"mode": "plain", "batch_size": 4, "shuffle": False, "with_refs": True}
    whole = keys(StreamLoader(tmp_path / "s", processor=processor, bad_budget=None, **options))
    loader = StreamLoader(tmp_path / "s", processor=processor, bad_budget=0.01, **options)
    seen = []
    batches = iter(loader)
    with pytest.raises(BadBudgetError):
        seen.extend(key for batch in batches for key in keys([batch]))
    with pytest.raises(RuntimeError, match=r"has ended .by BadBudgetError"):
        next(batches)
    resumed = StreamLoader(tmp_path / "s", processor=processor, bad_budget=None, **options)
    resumed.load_state_dict(loader.state_dict())
    assert seen + keys(resumed) == whole


def test_stream_and_loader_take_the_same_options(toy_shards, processor):
    options = StreamOptions(pack_size=1024, with_refs=True)
    expected = keys(StreamLoader(toy_shards, processor=processor, **PACKED))
    assert keys(StreamLoader(toy_shards, processor=processor, options=options)) == expected
    assert keys(VLMStream(toy_shards, processor=processor, options=options)) == expected
    assert keys(VLMStream(toy_shards, processor=processor, **PACKED)) == expected
    for kind in (StreamLoader, VLMStream):
        with pytest.raises(ConfigError, match="options were given twice"):
            kind(toy_shards, processor=processor, options=options, pack_size=512)
        with pytest.raises(ConfigError, match="there is no option 'pack_siz'; did you mean 'pack_size'"):
            kind(toy_shards, processor=processor, pack_siz=512)
    with pytest.raises(ConfigError, match="allow='x' is no override"):
        StreamLoader(toy_shards, processor=processor, pack_size=8, allow=("x",))


def test_batches_that_were_cut_by_rows_are_refused(toy_shards, processor):
    for batch in (next(iter(StreamLoader(toy_shards, processor=processor, num_workers=n, **PACKED))) for n in (0, 1)):
        assert type(batch) is Batch
        same = Batch({key: value.to("cpu") if hasattr(value, "to") else value for key, value in batch.items()})
        assert same.keys() == batch.keys()
        name = next(key for key in ("pixel_values", "pixel_values_videos") if key in batch)
        with pytest.raises(ConfigError, match=rf"batch\['{name}'\] was cut from \d+ to 1 rows .*give the trainer"):
            Batch({key: value[:1] if key == name else value for key, value in batch.items()})


def test_a_dataloader_that_would_stack_batches_is_refused(toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, pack_size=1024)
    for num_workers in (0, 1):
        with pytest.raises(ConfigError, match=r"use DataLoader\(stream, batch_size=None\)"):
            next(iter(DataLoader(stream, batch_size=2, num_workers=num_workers)))


def test_accelerates_shards_of_a_stream_are_refused(toy_shards, processor):
    from accelerate.data_loader import IterableDatasetShard

    stream = VLMStream(toy_shards, processor=processor, pack_size=1024)
    with pytest.raises(ConfigError, match="most batches would reach nobody"):
        next(iter(IterableDatasetShard(stream, batch_size=1, num_processes=2)))


def test_every_rank_writes_a_ledger_of_its_own(toy_shards, processor, tmp_path):
    whole = StreamLoader(toy_shards, processor=processor, pack_size=400, bad_budget=None)
    for _ in whole:
        pass
    for rank in range(2):
        path = tmp_path / "ledger.jsonl"
        loader = StreamLoader(
            toy_shards, processor=processor, pack_size=400, bad_budget=None, ledger_path=path, rank=rank, world_size=2
        )
        assert sum(1 for _ in loader)
        assert len((tmp_path / f"ledger.rank{rank}.jsonl").read_text().splitlines()) == loader.ledger.num_bad > 0
    assert "fit: too_long" in repr(whole.ledger)


def test_a_ledger_that_cannot_be_written_is_said_before_the_first_batch(toy_shards, processor, tmp_path):
    with pytest.raises(ConfigError, match=r"the ledger .* cannot be written \(Is a directory\)"):
        next(iter(StreamLoader(toy_shards, processor=processor, pack_size=400, ledger_path=tmp_path)))


def test_whoever_counts_batches_gets_the_next_epoch(toy_shards, processor):
    both = StreamLoader(toy_shards, processor=processor, **PACKED)
    expected = [keys(both), keys(both)]
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    for epoch in range(2):
        batches = iter(loader)
        assert keys([next(batches) for _ in range(len(loader))]) == expected[epoch]
    resumed = StreamLoader(toy_shards, processor=processor, **PACKED)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []  # the rest of its epoch
    resumed.load_state_dict(loader.state_dict())
    resumed.end_round()
    resumed.end_round()  # nothing of the next one was handed out
    assert next(iter(resumed))
    assert resumed.batches_left == len(resumed) - 1


def test_a_loader_is_no_dataset_of_samples(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    with pytest.raises(ConfigError, match="hands out ready batches in its own order and has no sample number 0"):
        loader[0]
    with pytest.raises(ConfigError, match="give it to a trainer as its data loader"):
        next(iter(DataLoader(loader, batch_size=2)))


def test_a_loader_that_was_iterated_travels_to_another_process(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    batches = iter(loader)
    seen = keys([next(batches)])
    copied = pickle.loads(pickle.dumps(loader))
    assert seen + keys(copied) == keys(StreamLoader(toy_shards, processor=processor, **PACKED))


def test_workers_start_with_the_first_batch(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, num_workers=1, **PACKED)
    batches = iter(loader)
    assert loader.worker_pids() == []
    next(batches)
    assert len(loader.worker_pids()) == 1


def test_the_number_of_workers_may_change_while_running(nothing_is_late, toy_shards, processor):
    expected = keys(StreamLoader(toy_shards, processor=processor, **PACKED))
    loader = StreamLoader(toy_shards, processor=processor, **PACKED)
    came, workers = [], []
    for number, batch in enumerate(loader):
        came += keys([batch])
        if number == 4:
            wait_for(lambda: len(loader.worker_pids()) == 2)
        workers.append(len(loader.worker_pids()))
        if number in (3, 7, 11):
            loader.set_workers({3: 2, 7: 1, 11: 0}[number])
    assert came == expected
    assert workers[3] == 0
    assert workers[4] == 2
    assert workers[-1] == 0
    assert loader.metrics()["worker_restarts"] == 0
    with pytest.raises(ConfigError, match="num_workers is -1"):
        loader.set_workers(-1)


def test_workers_that_are_replaced_for_their_memory_are_counted(nothing_is_late, toy_shards):
    options = {"processor": None, "mode": "plain", "batch_size": 5}
    loader = StreamLoader(toy_shards, num_workers=1, worker_memory=1 << 20, **options)
    assert sum(len(batch["samples"]) for batch in loader) == 60
    assert loader.metrics()["workers_recycled"] >= 1
    assert loader.metrics()["worker_restarts"] == 0
