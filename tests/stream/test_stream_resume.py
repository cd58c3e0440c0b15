"""Stop after any batch, go on with any number of workers or ranks: the rest is what would have come."""

import json

import pytest
import torch

from vlm_stream import StreamLoader

MODES = {
    "packed": {"mode": "packed", "pack_size": 1024},
    "packed rows": {"mode": "packed", "pack_size": 1024, "batch_size": 2, "micro_batches": 2},
    "grouped": {"mode": "grouped", "batch_size": 3},
    "plain": {"mode": "plain", "batch_size": 4},
}


def make_loader(shards, processor, **options):
    return StreamLoader(shards, processor=processor, with_refs=True, window=32, **options)


def same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key], key


def keys_of(batches):
    return [tuple(name) for batch in batches for row in batch["refs"] for name in row]


@pytest.fixture(scope="module", params=MODES)
def run(request, toy_shards, processor):
    """The options of a mode, its uninterrupted run, and the state after each batch."""
    options = MODES[request.param]
    loader = make_loader(toy_shards, processor, **options)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.state_dict()))
    return options, batches, states


def test_every_sample_is_delivered_exactly_once(run):
    _, batches, _ = run
    keys = keys_of(batches)
    assert len(keys) == len(set(keys)) == 60


def test_the_rest_after_any_batch_is_bit_equal(run, toy_shards, processor):
    options, batches, states = run
    for position, state in enumerate(states):
        loader = make_loader(toy_shards, processor, **options)
        loader.load_state_dict(json.loads(state))
        following = next(iter(loader), None)
        if position + 1 < len(batches):
            same(following, batches[position + 1])
        else:
            assert following is None


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4")  # on machines with fewer cores
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_change_nothing(run, toy_shards, processor, num_workers):
    options, batches, states = run
    loader = make_loader(toy_shards, processor, num_workers=num_workers, **options)
    middle = len(batches) // 2
    loader.load_state_dict(json.loads(states[middle]))
    rest = list(loader)
    assert len(rest) == len(batches) - middle - 1
    for left, right in zip(rest, batches[middle + 1 :], strict=True):
        same(left, right)


def test_the_state_is_small(run):
    _, _, states = run
    assert max(map(len, states)) < 16 * 1024


def test_ranks_change_in_mid_epoch_and_every_sample_still_comes_once(run, toy_shards, processor):
    options, _, _ = run
    seen, state = [], None
    for world_size, num_batches in ((2, 2), (3, 1), (1, None)):
        loaders = [
            make_loader(toy_shards, processor, rank=r, world_size=world_size, **options) for r in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        streams = [iter(loader) for loader in loaders]
        taken = 0
        while num_batches is None or taken < num_batches:
            batches = [next(stream, None) for stream in streams]
            if batches[0] is None:
                assert all(batch is None for batch in batches)  # every rank ends at the same step
                break
            seen += keys_of(batches)
            taken += 1
        states = [json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders]
        assert len(set(states)) == 1  # a state belongs to the run, not to a rank
        state = json.loads(states[0])
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 60
