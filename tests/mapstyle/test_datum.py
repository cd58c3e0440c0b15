"""Token rows with weights, log-probabilities and advantages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.mapstyle import Datum, collate_datums


def datum(length: int, advantage: float = 1.0) -> Datum:
    numbers = torch.arange(length)
    extra = {"target_tokens": numbers + 10, "weights": (numbers % 2).float(), "advantages": torch.tensor([advantage])}
    return Datum(numbers, extra)


def test_padded_and_packed() -> None:
    rows = [datum(3), datum(2, 4.0)]
    padded = collate_datums(rows, pad_seq_len_divisible=4)
    assert padded["input_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert padded["labels"].tolist() == [[-100, 11, -100, -100], [-100, 11, -100, -100]]
    assert padded["padding_mask"].tolist() == [[False] * 3 + [True], [False] * 2 + [True] * 2]
    assert padded["weights"].tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert padded["advantages"].tolist() == [1, 4]
    packed = collate_datums(rows, packed=True)
    assert packed["input_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["seq_lens"].tolist() == packed["seq_lens_padded"].tolist() == [[3, 2]]
    assert packed["weights"].shape == (1, 5)
    assert packed["qkv_format"] == "thd"
    assert set(collate_datums([Datum([1, 2])])) == {"input_ids", "attention_mask", "padding_mask"}
    assert collate_datums([Datum([1, 2])], packed=True)["labels"].tolist() == [[-100, -100]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_both_forms_hold_the_same_tokens_and_weights(lengths: list[int]) -> None:
    rows = [datum(length) for length in lengths]
    padded, packed = collate_datums(rows), collate_datums(rows, packed=True)
    shown = ~padded["padding_mask"]
    for name in ("input_ids", "labels", "weights"):
        assert torch.equal(padded[name][shown], packed[name][0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="must be 1-D"):
        Datum([[1]])
    with pytest.raises(ValueError, match="weights has 2 numbers for 3 tokens"):
        Datum([1, 2, 3], {"weights": [1, 2]})
    with pytest.raises(ValueError, match="target_tokens has 1 numbers for 3 tokens"):
        Datum([1, 2, 3], {"target_tokens": [1]})
    with pytest.raises(ValueError, match="at least one Datum"):
        collate_datums([])
    with pytest.raises(ValueError, match="the same loss_fn_inputs"):
        collate_datums([datum(2), Datum([1])])
    with pytest.raises(ValueError, match="per token in some"):
        collate_datums([Datum([1, 2], {"a": [1, 2]}), Datum([1, 2], {"a": [1]})])
    with pytest.raises(ValueError, match="empty sequence"):
        collate_datums([Datum(torch.zeros(0, dtype=torch.int64))], packed=True)
