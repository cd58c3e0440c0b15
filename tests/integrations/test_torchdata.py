"""torchdata's StatefulDataLoader and torch's DataLoader over a `VLMStream`."""

import functools
import itertools
import json

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from vlm_stream import VLMStream
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.testing.conformance import Run, check, launch

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on machines with fewer cores
]

OPTIONS = {"pack_size": 1900, "window": 16, "pixels": False, "with_refs": True}
"""11 batches."""


def open_stream(data, **options):
    return VLMStream(str(data / "shards"), processor=str(data / "processor"), **OPTIONS | options)


def open_loader(data, num_workers, *, snapshot_every_n_steps=1, **options):
    arguments = {"batch_size": None, "num_workers": num_workers, "snapshot_every_n_steps": snapshot_every_n_steps}
    return StatefulDataLoader(open_stream(data, **options), **arguments)


def names(batch):
    return [tuple(name) for row in batch["refs"] for name in row]


@functools.cache
def whole_run(data):
    return [names(batch) for batch in open_stream(data)]


def begin(loader, num_batches):
    """Take so many batches; return them and the state, as a checkpoint keeps it."""
    batches = iter(loader)
    taken = [names(batch) for batch in itertools.islice(batches, num_batches)]
    return taken, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.trainers
def test_the_example_conforms(tmp_path, conformance_data):
    cannot = {"world": "torchdata keeps a state for each worker; several of them cannot be dealt out anew"}
    report = check("tests.integrations.torchdata_trainers:ddp", tmp_path, data=conformance_data, cannot=cannot)
    assert {result for name, result in report.results.items() if name not in cannot} == {"yes"}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_the_rest_after_some_batches_is_what_would_have_come(conformance_data, num_workers, every):
    whole = whole_run(conformance_data)
    assert len(whole) == len(open_loader(conformance_data, num_workers)) == 11
    for num_batches in (0, 1, 4, 11) if num_workers < 2 else (1, 4, 10):
        taken, state = begin(open_loader(conformance_data, num_workers, snapshot_every_n_steps=every), num_batches)
        assert taken == whole[:num_batches]
        resumed = open_loader(conformance_data, num_workers, snapshot_every_n_steps=every)
        resumed.load_state_dict(state)
        assert [names(batch) for batch in resumed] == whole[num_batches:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_ranks_go_on_from_the_state_of_one_worker(conformance_data, num_workers):
    taken, states = zip(
        *(begin(open_loader(conformance_data, num_workers, rank=rank, world_size=2), 3) for rank in range(2)),
        strict=True,
    )
    resumed = open_loader(conformance_data, num_workers)
    resumed.load_state_dict(states[1])
    rest = [names(batch) for batch in resumed]
    seen = [name for batch in [*taken[0], *taken[1], *rest] for name in batch]
    assert len(seen) == len(set(seen)) == 70


@pytest.mark.parametrize("change", [{"rank": 0, "world_size": 2}, {"batch_size": 2}, {"micro_batches": 2}])
def test_several_workers_refuse_what_would_deal_batches_out_otherwise(conformance_data, change):
    _, state = begin(open_loader(conformance_data, 2), 3)
    resumed = open_loader(conformance_data, 2, **change)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match=r"state of one of 2 workers, and the number of ranks, .* with a StreamLoader"):
        next(iter(resumed))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_workers_gets_a_sentence(conformance_data, before, after):
    _, state = begin(open_loader(conformance_data, before), 3)
    resumed = open_loader(conformance_data, after)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match=rf"one of {before} workers, and there are {after} now.*num_workers={before}"):
        next(iter(resumed))


@pytest.mark.parametrize(("before", "after", "says"), [(0, 1, "_snapshot"), (1, 0, "_num_yielded")])
def test_between_no_workers_and_some_torchdata_refuses_itself(conformance_data, before, after, says):
    """Before the stream is asked: nothing that it could say better."""
    _, state = begin(open_loader(conformance_data, before), 1)
    resumed = open_loader(conformance_data, after)
    resumed.load_state_dict(state)
    with pytest.raises(AssertionError, match=f"State doesn't contain key '{says}'"):
        next(iter(resumed))


def test_several_epochs_are_one_iteration(conformance_data):
    """A DataLoader starts its workers anew for every iteration, and they begin at the beginning."""
    loader = open_loader(conformance_data, 1, epochs=2)
    length = len(loader)
    taken, state = begin(loader, 15)
    resumed = open_loader(conformance_data, 1, epochs=2)
    resumed.load_state_dict(state)
    rest = [names(batch) for batch in resumed]
    assert len(taken) + len(rest) == length > len(whole_run(conformance_data))
    once = sorted(itertools.chain(*whole_run(conformance_data)))
    assert sorted(itertools.chain(*taken, *rest)) == sorted(once * 2)


def test_an_evaluation_begins_at_the_beginning_whatever_was_loaded(conformance_data):
    taken, state = begin(open_loader(conformance_data, 1, train=False), 2)
    again = open_loader(conformance_data, 1, train=False)
    again.load_state_dict(state)
    assert [names(batch) for batch in itertools.islice(again, 2)] == taken


def test_batches_come_through_a_dataloader_as_they_are(conformance_data):
    own = list(open_stream(conformance_data, pixels=True))
    for loader in (DataLoader, StatefulDataLoader):
        for num_workers in (0, 2):
            given = list(loader(open_stream(conformance_data, pixels=True), batch_size=None, num_workers=num_workers))
            assert len(given) == len(own)
            for left, right in zip(given, own, strict=True):
                assert left.keys() == right.keys()
                tensors = [key for key, value in right.items() if isinstance(value, torch.Tensor)]
                assert len(tensors) >= 5
                assert all(torch.equal(left[key], right[key]) for key in tensors)


def test_a_stateful_loader_with_a_batch_size_is_refused(conformance_data):
    with pytest.raises(ConfigError, match="batch_size=None"):
        next(iter(StatefulDataLoader(open_stream(conformance_data), batch_size=2)))


@pytest.mark.slow
@pytest.mark.trainers
def test_workers_of_a_dataloader_know_their_rank_however_they_were_started(tmp_path, conformance_data):
    folder = tmp_path / "taken"
    run = Run(data=conformance_data, folder=folder, records=tmp_path / "records", options=OPTIONS)
    launch("tests.integrations.torchdata_trainers:start_methods", run, world=2)
    taken = [json.loads((folder / f"taken-{rank}.json").read_text()) for rank in range(2)]
    for method in ("fork", "spawn", "forkserver"):
        ranks = [{tuple(name) for name in rank[method]} for rank in taken]
        assert not ranks[0] & ranks[1]
        assert ranks[0] | ranks[1] == {name for batch in whole_run(conformance_data) for name in batch}
        assert sum(len(rank[method]) for rank in taken) == 70
