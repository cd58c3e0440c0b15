"""A batch that fails is replaced, the same way every time."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from vlm_stream.mapstyle import make_robust_collate

DATASET = [{"conversation": [{"role": "user", "content": f"text {i}"}], "number": i} for i in range(50)]


def numbers(batch):
    if any(example["number"] < 10 for example in batch):
        raise ValueError("bad example")
    return [example["number"] for example in batch]


def test_good_batches_pass_untouched():
    assert make_robust_collate(DATASET, numbers)(DATASET[20:23]) == [20, 21, 22]


def test_replacement_depends_on_the_batch_alone(caplog):
    with caplog.at_level(logging.WARNING):
        first = make_robust_collate(DATASET, numbers)(DATASET[3:6])
    assert "A batch of 3 failed to collate" in caplog.text
    random.seed(99)
    collate = make_robust_collate(DATASET, numbers)
    collate(DATASET[7:9])
    assert collate(DATASET[3:6]) == first
    assert len(first) == 3
    assert min(first) >= 10


@pytest.mark.parametrize(
    "as_example",
    [
        lambda i: {"input_ids": torch.tensor([i, i + 1])},
        lambda i: {"input_ids": [i], "labels": [i]},
        lambda i: [{"input_ids": torch.tensor([1])}, {"input_ids": torch.tensor([i])}],
    ],
)
def test_encoded_samples_and_packs_have_replacements_of_their_own(as_example):
    good = {id(example): i for i, example in enumerate(DATASET)}

    def places(batch):
        return [good[id(example)] for example in batch]  # raises for what is not in the dataset

    collate = make_robust_collate(DATASET, places)
    first, second, again = (collate([as_example(i)] * 4) for i in (3, 4, 3))
    assert first == again
    assert first != second


def test_retries_are_used_up():
    calls = []

    def never(batch):
        calls.append(len(batch))
        raise ValueError("never works")

    with pytest.raises(RuntimeError, match=r"Collate failed after 4 retries.*never works"):
        make_robust_collate(DATASET, never, max_retries=4)(DATASET[:2])
    assert calls == [2, 2, 2, 2]
