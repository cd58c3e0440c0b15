"""webdataset's pipelines over planned sources: every sample once, whoever resumes them."""

from __future__ import annotations

import itertools
import json
import os
import tarfile
import warnings

import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.foreign_tars import write_captions, write_tar
from vlm_stream import StreamLoader
from vlm_stream.errors import BadSampleError, ConfigError, StateError
from vlm_stream.testing import make_jpeg
from vlm_stream.wds import Stages, planned

NUM_SAMPLES = 23


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Three tars whose number of samples divides by nothing."""
    folder = tmp_path_factory.mktemp("tars")
    image = make_jpeg(24, 24)
    for number, size in enumerate((10, 6, 7)):
        samples = [(f"{number}{k:02d}", {"jpg": image, "cls": b"%d" % k, "bin": bytes(9)}) for k in range(size)]
        write_tar(folder / f"{number}.tar", samples)
    return folder


def test_samples_are_those_of_webdataset(tars):
    url = str(tars / "{0..2}.tar")
    found = {sample["__key__"]: sample for sample in planned(url)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {s["__key__"]: s for s in wds.WebDataset(url, shardshuffle=False)}
    assert set(found) == set(expected)
    for key, sample in expected.items():
        members = {name: value for name, value in sample.items() if not name.startswith("__")}
        assert members == {name: value for name, value in found[key].items() if not name.startswith("__")}
        assert found[key]["__url__"] == sample["__url__"]


def test_a_pipeline_decodes_and_iterating_again_is_the_next_epoch(tars):
    pipeline = wds.DataPipeline(
        planned(str(tars), seed=3), wds.decode("pil"), wds.to_tuple("__key__", "jpg", "cls"), wds.batched(5)
    )
    epochs = [[key for keys, *_ in pipeline for key in keys] for _ in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [NUM_SAMPLES] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    _, images, classes = next(iter(pipeline))
    assert images[0].size == (24, 24)
    assert 0 <= classes[0] < 10


def run(tars, world, state, counts):
    """Consume `counts` samples on each rank; return what came and the state of the last rank."""
    keys, left = [], state
    for rank in range(world):
        source = planned(str(tars), seed=5, rank=rank, world_size=world)
        if state is not None:
            source.load_state_dict(json.loads(json.dumps(state)))
        keys += [sample["__key__"] for sample in itertools.islice(source, counts)]
        left = source.state_dict()
    return keys, left


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=4), st.integers(1, 4))
@settings(max_examples=15)
def test_every_sample_comes_once_over_any_chain_of_world_sizes(tars, runs, last):
    state, seen = None, []
    for world, count in runs:
        keys, state = run(tars, world, state, count)
        seen += keys
        if len(seen) + world * 4 > NUM_SAMPLES:
            break
    rest = run(tars, last, state, None)[0] if len(seen) < NUM_SAMPLES else []  # iterating again is the next epoch
    assert sorted(seen + rest) == sorted(sample["__key__"] for sample in planned(str(tars), seed=5))


def consume(tars, state, *, world, workers, batches, batch_size=2):
    """Take some batches (None: all) of a DataLoader on each rank, noting them; return keys and state."""
    keys, left = [], state
    for rank in range(world):
        source = planned(str(tars), seed=5, batch_size=batch_size, rank=rank, world_size=world)
        if state is not None:
            source.load_state_dict(state)
        pipeline = wds.DataPipeline(source, wds.to_tuple("__key__", "__place__"), wds.batched(batch_size))
        loader = DataLoader(pipeline, batch_size=None, num_workers=workers)
        for own, places in itertools.islice(loader, batches):
            keys += own
            source.note(places)
        left = source.state_dict()
    return keys, left


@pytest.mark.parametrize(("world", "workers", "batches"), [(1, 2, 3), (2, 2, 2)])
def test_dataloader_workers_and_ranks_may_change(tars, world, workers, batches):
    everything = sorted(sample["__key__"] for sample in planned(str(tars), seed=5))
    begun, state = consume(tars, None, world=world, workers=workers, batches=batches)
    assert len(begun) == world * batches * 2
    more, again = consume(tars, state, world=1, workers=1, batches=2)
    for other_world, other_workers in ((1, 2), (2, 1), (3, 1)):
        rest, _ = consume(tars, again, world=other_world, workers=other_workers, batches=None)
        assert sorted(begun + more + rest) == everything


def test_batches_of_workers_come_in_the_order_of_the_plan(tars):
    alone = [sample["__key__"] for sample in planned(str(tars), seed=5)]
    shared, _ = consume(tars, None, world=1, workers=2, batches=None)
    assert shared[:20] == alone[:20]


def make_loader(tars, **options):
    """Return a source that is seen through a pipeline, and its DataLoader."""
    source = planned(str(tars), seed=5, batch_size=2)
    pipeline = wds.DataPipeline(source, wds.to_tuple("__key__", "__place__"), wds.batched(2))
    return source, DataLoader(pipeline, batch_size=None, **options)


def take(source, batches, *, noted=True):
    keys = []
    for own, places in batches:
        keys += own
        if noted:
            source.note(places)
    return keys


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_passes_over_a_dataloader_are_epochs_noted_or_not(tars, persistent, noted):
    expected = planned(str(tars), seed=5)
    expected = [[sample["__key__"] for sample in expected] for _ in range(3)]
    source, loader = make_loader(tars, num_workers=2, persistent_workers=persistent)
    assert [sorted(take(source, loader, noted=noted)) for _ in range(3)] == [sorted(epoch) for epoch in expected]
    fourth = take(source, itertools.islice(loader, 6), noted=noted)
    assert len(set(fourth)) == 12
    assert fourth not in [epoch[:12] for epoch in expected]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.booleans(), st.integers(1, 14)), min_size=2, max_size=4),
)
@settings(max_examples=8, deadline=None)
def test_broken_passes_and_states_within_them_lose_and_repeat_nothing(tars, passes):
    """Take so many batches in each pass (12 are an epoch), with states saved and loaded in between."""
    epochs = planned(str(tars), seed=5)
    epochs = [sorted(sample["__key__"] for sample in epochs) for _ in range(len(passes))]
    source, loader = make_loader(tars, num_workers=1, persistent_workers=True)
    seen = []
    for workers, resumes, count in passes:
        if resumes or workers != loader.num_workers:
            state = source.state_dict()
            source, loader = make_loader(tars, num_workers=workers, persistent_workers=workers > 0)
            source.load_state_dict(json.loads(json.dumps(state)))
        for number, batch in enumerate(itertools.islice(loader, count)):
            seen += take(source, [batch])
            if number % 2:
                source.state_dict()  # looking changes nothing
    while seen:
        part, seen = seen[:NUM_SAMPLES], seen[NUM_SAMPLES:]
        assert len(set(part)) == len(part)
        assert sorted(part) == epochs.pop(0) or not seen


def test_a_rank_that_gets_one_sample_fewer_goes_on_with_the_others(tars):
    source = planned(str(tars), seed=5, rank=1, world_size=2)
    loader = DataLoader(wds.DataPipeline(source, wds.to_tuple("__key__", "__place__")), batch_size=None, num_workers=1)
    passes = [take(source, (([key], place) for key, place in loader)) for _ in range(3)]
    assert list(map(len, passes)) == [11, 11, 11]
    assert len(set(map(tuple, passes))) == 3


def test_what_a_stage_took_ahead_comes_again_where_samples_are_noted(tars):
    source, loader = make_loader(tars, num_workers=0)
    begun = take(source, itertools.islice(loader, 3))
    resumed = planned(str(tars), seed=5)
    resumed.load_state_dict(source.state_dict())
    rest = [sample["__key__"] for sample in resumed]
    assert len(begun) == 6
    assert sorted(begun + rest) == sorted(sample["__key__"] for sample in planned(str(tars), seed=5))


def test_places_that_do_not_follow_each_other_are_refused(tars):
    source = planned(str(tars), seed=5)
    places = [sample["__place__"] for sample in source]
    source.note(places[3::-1])  # within a batch any order will do
    with pytest.raises(StateError, match=r"noted after later ones of its worker.*keep the order of the source"):
        source.note(places[2])
    with pytest.raises(StateError, match="places of two DataLoaders were noted"):
        source.note(places[9].replace("0/1", "0/2"))
    source.note(places[4:])
    again = [sample["__place__"] for sample in source]
    source.note(again[0])
    with pytest.raises(StateError, match=r"samples of another iteration were noted.*before the first of the next"):
        source.note(places[5])


def test_a_state_that_nobody_noted_is_refused(tars):
    source = planned(str(tars))
    list(DataLoader(source, batch_size=None, num_workers=1))
    with pytest.raises(StateError, match=r"handed out in DataLoader workers.*source.note"):
        source.state_dict()
    with pytest.raises(StateError, match="is not the __place__ of a sample"):
        source.note(["abc"])
    with pytest.raises(StateError, match="not the state of a planned source"):
        source.load_state_dict({"a": 1})
    with pytest.raises(ConfigError, match="processor cannot be set"):
        planned(str(tars), processor="x")


def test_bad_samples_go_to_the_handler(tars, tmp_path):
    broken = tmp_path / "broken.tar"
    broken.write_bytes((tars / "1.tar").read_bytes())
    url = str(broken)
    assert len(list(planned(url))) == 6
    with tarfile.open(broken) as tar:
        offset = tar.getmember("103.jpg").offset_data
    stamp = broken.stat()
    content = bytearray(broken.read_bytes())
    content[offset + 5] ^= 1
    broken.write_bytes(content)
    os.utime(broken, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # damage does not announce itself
    with pytest.raises(BadSampleError, match=r"broken.tar, sample '103'"):
        list(planned(url))
    with pytest.raises(BadSampleError):
        list(planned(url, handler=wds.reraise_exception))
    with pytest.warns(UserWarning, match="103"):
        found = [sample["__key__"] for sample in planned(url, handler=wds.warn_and_continue)]
    assert sorted(found) == ["100", "101", "102", "104", "105"]
    stopped = [sample["__key__"] for sample in planned(url, shuffle=False, handler=wds.ignore_and_stop)]
    assert stopped == ["100", "101", "102"]


def test_stages_run_in_the_workers_of_a_loader(tars):
    stages = Stages(wds.decode("pil"), wds.to_tuple("__key__", "jpg"), wds.batched(4))
    options = {"processor": None, "mode": "plain", "batch_size": 4, "collate_fn": stages}
    loader = StreamLoader(str(tars), num_workers=1, **options)
    (keys, images) = next(iter(loader))["samples"][0]
    assert images[0].size == (24, 24)
    resumed = StreamLoader(str(tars), **options)
    resumed.load_state_dict(loader.state_dict())
    loader.close()
    rest = [key for batch in resumed for own, _ in batch["samples"] for key in own]
    assert len(set(rest) | set(keys)) == NUM_SAMPLES == len(rest) + len(keys)


def test_our_shards_are_read_by_webdataset(toy_shards):
    url = sorted(map(str, toy_shards.glob("*.tar")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = {s["__key__"]: s for s in wds.WebDataset(url, shardshuffle=False)}
        decoded = list(wds.WebDataset(url, shardshuffle=False).decode("pil", only=["jpg", "png", "json", "0.jpg"]))
    ours = {sample["__key__"]: sample for sample in planned(str(toy_shards))}
    assert set(ours) == set(raw)
    for key, sample in raw.items():
        assert {n: v for n, v in sample.items() if n[0] != "_"} == {n: v for n, v in ours[key].items() if n[0] != "_"}
    assert all(isinstance(sample["json"]["conversation"], list) for sample in decoded)
    assert any(hasattr(sample.get("0.jpg"), "size") for sample in decoded)


def test_captions_that_lack_a_text_still_come(tmp_path):
    write_captions(tmp_path / "tars", num_tars=1)
    write_tar(tmp_path / "tars" / "x.tar", [("bare", {"jpg": b"no image"})])
    assert "bare" in {sample["__key__"] for sample in planned(str(tmp_path / "tars"))}
