"""Best-fit decreasing under the reference's names, and fair, balanced sets of packs."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.mapstyle import (
    BalancedPackSampler,
    greedy_knapsack,
    greedy_knapsack_vt_balanced,
    neat_pack_dataset_vlm,
)


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [  # golden values of the reference
        ([3, 2, 4, 1], 5, [[2, 3], [0, 1]]),
        ([3, 10, 2], 5, [[0, 2]]),
        ([7, 5, 5, 3, 2, 2, 1], 10, [[0, 3], [1, 2], [4, 5, 6]]),
        ([0, 0, 3], 3, [[2, 0, 1]]),
        ([], 5, []),
        ([9], 5, []),
    ],
)
def test_goldens(lengths: list[int], capacity: int, bins: list[list[int]]) -> None:
    assert greedy_knapsack(lengths, capacity) == bins


def test_best_fit_is_what_the_documentation_promises() -> None:
    """Worst-fit needs a third bin here: it puts 4 beside 5 and 3 beside 6, and 2 finds no place."""
    assert sorted(map(sorted, greedy_knapsack([6, 5, 4, 3, 2], 10))) == [[0, 2], [1, 3, 4]]
    bins = greedy_knapsack([3, 3, 2, 2, 1, 1, 1, 1], 5)
    assert sorted(sum([3, 3, 2, 2, 1, 1, 1, 1][i] for i in members) for members in bins) == [4, 5, 5]


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 50))
def test_every_sample_that_fits_is_in_one_bin(lengths: list[int], capacity: int) -> None:
    bins = greedy_knapsack(lengths, capacity)
    assert sorted(i for members in bins for i in members) == [i for i, n in enumerate(lengths) if n <= capacity]
    fills = [sum(lengths[i] for i in members) for members in bins]
    assert all(members for members in bins)
    assert all(fill <= capacity for fill in fills)
    # No two bins could be one.
    assert all(a + b > capacity for a, b in pairwise(sorted(fills)))


def test_samples_that_fit_nowhere_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        greedy_knapsack([3, 10, 2, 11], 5)
    assert "2 of 4 samples are longer than the capacity of 5 tokens" in caplog.text


def test_balanced_bins_are_neighbours_in_load() -> None:
    lengths, visual = [7, 5, 5, 3, 2, 2, 1], [6, 0, 4, 0, 2, 0, 0]
    assert greedy_knapsack_vt_balanced(lengths, 10, visual) == [[4, 5, 6], [1, 2], [0, 3]]
    assert sorted(greedy_knapsack_vt_balanced(lengths, 10, visual)) == sorted(greedy_knapsack(lengths, 10))


def metadata(seed: int = 0, n: int = 400) -> list[dict[str, Any]]:
    """Return raw samples that are only metadata: half of them text, half with an image of any size."""
    rng = np.random.default_rng(seed)
    sides = rng.integers(100, 900, (n, 2)).tolist()
    texts = rng.integers(20, 400, n).tolist()
    return [
        {
            "conversation": [{"role": "user", "content": [{"type": "image"}] if i % 2 else []}],
            "_text_tokens": texts[i],
            "mm_inputs_meta": {"images_meta": [sides[i]] if i % 2 else [], "videos_meta": []},
        }
        for i in range(n)
    ]


def test_max_packs_keeps_all_kinds_of_packs(processor: Any, caplog: pytest.LogCaptureFixture) -> None:
    raw = metadata()
    whole = neat_pack_dataset_vlm(raw, 2048, ds_raw=raw, processor=processor)
    with caplog.at_level(logging.WARNING):
        cut = neat_pack_dataset_vlm(raw, 2048, ds_raw=raw, processor=processor, max_packs=10)
    assert len(cut) == 10 < len(whole)
    assert f"leaves out {len(whole) - 10} packs with" in caplog.text
    assert np.mean(cut.visual_loads) == pytest.approx(np.mean(whole.visual_loads), rel=0.05)
    assert all(members in whole.bins for members in cut.bins)


def test_balance_survives_shuffling(processor: Any) -> None:
    raw = metadata(n=4000)
    packs = neat_pack_dataset_vlm(raw, 2048, ds_raw=raw, processor=processor)
    ranks, loads = 8, np.asarray(packs.visual_loads)

    def spread(orders: np.ndarray[Any, Any]) -> float:
        """Return the mean over steps of the heaviest rank's load over the mean rank's."""
        by_step = loads[orders]  # [ranks, steps]
        return float((by_step.max(axis=0) / by_step.mean(axis=0).clip(1)).mean())

    def epoch(number: int) -> np.ndarray[Any, Any]:
        samplers = [BalancedPackSampler(packs, ranks, rank, seed=7) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(number)
        return np.asarray([list(sampler) for sampler in samplers])

    first, second = epoch(0), epoch(1)
    assert first.shape == (ranks, len(packs) // ranks)
    assert len(np.unique(first)) == first.size
    assert not np.array_equal(first, second)
    shuffled = np.random.default_rng(0).permutation(len(packs))[: first.size].reshape(ranks, -1)
    assert spread(first) < 1.1 < 1.3 < spread(shuffled)
    # No curriculum: early and late steps are alike.
    early, late = (loads[first[:, part]].mean() for part in (slice(0, 10), slice(-10, None)))
    assert 0.5 < early / late < 2


def test_batches_of_balanced_packs() -> None:
    packs = SimpleNamespace(visual_loads=list(range(26)))
    samplers = [BalancedPackSampler(packs, 2, rank, batch_size=3) for rank in range(2)]
    rows = [np.asarray(list(sampler)).reshape(-1, 3) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [12, 12]
    for mine, other in zip(*rows, strict=True):
        assert abs(mine - other).max() <= 3


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="do not know their visual loads"):
        BalancedPackSampler(SimpleNamespace(visual_loads=None))
    with pytest.raises(ConfigError, match="rank 2 does not exist among 2 replicas"):
        BalancedPackSampler(SimpleNamespace(visual_loads=[1]), 2, 2)
    with pytest.raises(ConfigError, match="leaves room for no document"):
        neat_pack_dataset_vlm([], 8, sequence_alignment=0)
    with pytest.raises(ConfigError, match="leaves room for no document"):
        neat_pack_dataset_vlm([], 8, packing_ratio=0.1)
