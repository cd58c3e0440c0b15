"""Similar lengths side by side: coverage, rotation, states, ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.mapstyle import LengthGroupedSampler, RobustDatasetWrapper


def texts(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"conversation": [], "_text_tokens": n} for n in lengths]


def test_estimates(processor: Any) -> None:
    turn = lambda *items: {"conversation": [{"role": "user", "content": list(items)}]}  # noqa: E731
    image, words = {"type": "image"}, {"type": "text", "text": "hello world"}
    sampler = LengthGroupedSampler([turn(words), turn(image, image), turn(words, image) | {"_text_tokens": 7}])
    assert sampler.text_lengths == [3, 0, 7]
    assert sampler.media_lengths == [0, 1000, 500]
    assert sampler.lengths == [3, 1000, 507]
    assert sampler.sorted_indices == [1, 2, 0]
    sized = turn(image) | {"mm_inputs_meta": {"images_meta": [[56, 112]], "videos_meta": []}}
    assert LengthGroupedSampler([sized], processor=processor).media_lengths == [8]
    assert sampler._estimate_tokens(turn(words, image)) == (3, 500)


@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.integers(1, 7),
    st.integers(0, 5),
    st.sampled_from(["rotate", "permute"]),
)
def test_every_epoch_has_every_sample_and_whole_batches(lengths: list[int], batch: int, epoch: int, order: str) -> None:
    sampler = LengthGroupedSampler(texts(lengths), batch_size=batch, order=order)
    sampler.set_epoch(epoch)
    got = list(sampler)
    assert sorted(got) == list(range(len(lengths)))
    assert got == list(sampler)
    whole = sampler.sorted_indices
    batches = {tuple(whole[i : i + batch]) for i in range(0, len(whole), batch)}
    assert {tuple(got[i : i + batch]) for i in range(0, len(got), batch)} == batches


def test_the_sorted_order_is_rotated() -> None:
    sampler = LengthGroupedSampler(texts(list(range(40))), batch_size=4)
    assert sampler.sorted_indices == list(range(39, -1, -1))
    starts = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        got = list(sampler)
        at = sampler.sorted_indices.index(got[0])
        assert got == sampler.sorted_indices[at:] + sampler.sorted_indices[:at]
        assert at % 4 == 0
        starts.add(at)
    assert len(starts) > 4
    other = LengthGroupedSampler(texts(list(range(40))), seed=43, batch_size=4)
    assert any(_epoch(sampler, e) != _epoch(other, e) for e in range(5))


def _epoch(sampler: LengthGroupedSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_permuted_batches_are_the_references() -> None:
    """Golden: torch's permutation of five batches for seed 42, then 43."""
    sampler = LengthGroupedSampler(texts([5, 4, 3, 2, 1]), order="permute")
    assert _epoch(sampler, 0) == [2, 4, 3, 0, 1]
    assert _epoch(sampler, 1) == [3, 1, 4, 2, 0]


def test_long_samples_are_left_out_with_slack(caplog: pytest.LogCaptureFixture) -> None:
    sampler = LengthGroupedSampler(texts([10, 611, 612, 613]), max_length=100)
    assert sampler.sorted_indices == [2, 1, 0]
    assert len(sampler) == 3
    assert "1 of 4 samples are left out: too long for 100" in caplog.text


def test_it_resumes_in_the_middle_of_an_epoch() -> None:
    lengths = [(i * 37) % 23 for i in range(30)]
    sampler = LengthGroupedSampler(texts(lengths), batch_size=4)
    sampler.set_epoch(3)
    iterator = iter(sampler)
    head = [next(iterator) for _ in range(11)]
    state = sampler.state_dict()
    other = LengthGroupedSampler(texts(lengths), batch_size=4)
    other.load_state_dict(state)
    assert list(other) == list(iterator)
    assert len(list(other)) == 30
    assert head + _rest(sampler, state) == _epoch(sampler, 3)
    assert sampler.state_dict()["position"] == 0


def _rest(sampler: LengthGroupedSampler, state: dict[str, Any]) -> list[int]:
    sampler.load_state_dict(state)
    return list(sampler)


def test_states_of_other_runs_are_refused() -> None:
    state = LengthGroupedSampler(texts([1, 2, 3])).state_dict()
    with pytest.raises(StateError, match="num_samples was 3 and is 2"):
        LengthGroupedSampler(texts([1, 2])).load_state_dict(state)
    with pytest.raises(StateError, match="state of version 9"):
        LengthGroupedSampler(texts([1])).load_state_dict({"version": 9})
    with pytest.raises(ConfigError, match="did you mean 'rotate'"):
        LengthGroupedSampler([], order="rotat")


class Lazy(Dataset[Any]):
    """A dataset that is no list and counts how many samples are alive at once."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"conversation": [], "_text_tokens": index % 7}


def test_wrapped_and_lazy_datasets_are_read_below_their_wrappers() -> None:
    sampler = LengthGroupedSampler(RobustDatasetWrapper(Lazy()))
    assert sampler.lengths == [i % 7 for i in range(50)]
    assert all(sampler.lengths[a] >= sampler.lengths[b] for a, b in pairwise(sampler.sorted_indices))


@given(st.data())
def test_subsets_are_ordered_by_their_own_indices(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=20))
    inner = Subset(texts(lengths), data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20)))
    chosen = data.draw(st.lists(st.integers(0, len(inner) - 1), max_size=20))
    subset = Subset(RobustDatasetWrapper(inner), chosen)
    sampler = LengthGroupedSampler(subset)
    assert sorted(sampler) == list(range(len(subset)))
    assert sampler.lengths == [subset[i]["_text_tokens"] for i in range(len(subset))]


ALIGN = """
import sys, torch.distributed as dist
from datetime import timedelta
from vlm_stream.mapstyle import LengthGroupedSampler
rank = int(sys.argv[1])
store, wait = "file://" + sys.argv[2], timedelta(seconds=60)
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=wait)
sampler = LengthGroupedSampler([{"conversation": [], "_text_tokens": n} for n in range(20 + 5 * rank)])
print(len(sampler), sampler.sorted_indices)
dist.destroy_process_group()
"""


def test_ranks_agree_on_a_number_without_cuda(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ALIGN, str(rank), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [out.split(maxsplit=1)[0] for out in outputs] == ["20", "20"]
    # What the longer rank leaves out is spread over the lengths: both ends are close to what they were.
    kept = [int(n) for n in outputs[1].split("[")[1].rstrip("]\n").split(",")]
    assert kept[0] >= 23
    assert kept[-1] <= 1
