"""Packs become batches: masks by brute force, positions, media, lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.collate import document_mask_4d, neat_packed_vlm_collater, packed_sequence_thd_vlm_collater
from vlm_stream.encode import IGNORE
from vlm_stream.errors import ConfigError


def pack(*lengths: int, axes: int = 0, images: int = 0, **more) -> dict:
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    out = {
        "input_ids": torch.arange(1, total + 1),
        "labels": torch.arange(total),
        "attention_mask": torch.cat([torch.full((n,), d) for d, n in enumerate(lengths, 1)]) if lengths else positions,
        "mm_token_type_ids": torch.zeros(total, dtype=torch.int64),
        "position_ids": positions.expand(axes, -1) if axes else positions,
        "n_images": images,
        "n_videos": 0,
        "pixel_values": torch.ones(images * 4, 6) if images else None,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * images) if images else None,
        "video_grid_thw": None,
        "second_per_grid_ts": None,
    }
    return out | more


@given(documents=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3))
def test_mask_is_block_causal_and_every_query_sees_something(documents):
    table = torch.tensor(documents)
    mask, added = document_mask_4d(table), document_mask_4d(table, torch.float32)
    for row, numbers in enumerate(documents):
        for query in range(5):
            for key in range(5):
                shares = numbers[query] == numbers[key] and numbers[key] > 0 and key <= query
                assert bool(mask[row, 0, query, key]) == (shares or query == key)
    assert torch.equal(added == 0, mask)
    assert (added[~mask] == torch.finfo(torch.float32).min).all()


def test_padding_and_keys_of_a_batch():
    batch = neat_packed_vlm_collater([pack(3, 2, images=2), pack(4)], padding_idx=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]]
    assert batch["labels"][1].tolist() == [0, 1, 2, 3, IGNORE]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["attention_mask"].shape == (2, 1, 5, 5)
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    assert batch["n_images_per_sample"].tolist() == [2, 0]
    assert "n_videos_per_sample" not in batch
    assert batch["pixel_values"].shape == (8, 6)
    assert "pixel_values_videos" not in batch
    assert neat_packed_vlm_collater([]) == {}


def test_softmax_over_the_mask_is_finite():
    batch = neat_packed_vlm_collater([pack(2, 1), pack(6)])
    q = torch.randn(2, 1, 6, 4)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=batch["attention_mask"])
    assert torch.isfinite(out).all()


def test_hidden_tokens_inside_a_document_are_seen_by_nobody():
    hidden = pack(4)
    hidden["attention_mask"] = torch.tensor([1, 0, 1, 1])  # a fake image that packing left out of the document
    mask = neat_packed_vlm_collater([hidden])["attention_mask"][0, 0]
    assert mask[:, 1].tolist() == [False, True, False, False]
    assert mask[3].tolist() == [True, False, True, True]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_flash_attention_keeps_document_numbers(attention):
    batch = neat_packed_vlm_collater([pack(3, 2), pack(4)], attn_implementation=attention)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]


def test_compact_mask_on_request_and_no_numbers_for_single_documents():
    batch = neat_packed_vlm_collater([pack(3)], materialize_4d_mask=False)
    assert batch["attention_mask"].tolist() == batch["_packed_seq_ids"].tolist() == [[1, 1, 1]]
    assert "_packed_seq_ids" not in neat_packed_vlm_collater([pack(3), pack(2)])


def test_fixed_length_and_packs_that_do_not_fit():
    assert neat_packed_vlm_collater([pack(3)], max_length=8)["input_ids"].shape == (1, 8)
    with pytest.raises(ConfigError, match="A pack has 5 tokens but batches are padded to 4"):
        neat_packed_vlm_collater([pack(3, 2)], max_length=4)


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_with_several_axes_and_empty_packs(axes):
    batch = neat_packed_vlm_collater([pack(3, axes=axes), pack(), pack(2)])
    assert batch["position_ids"].shape == (axes, 3, 3)
    assert batch["position_ids"][:, 2].tolist() == [[0, 1, 0]] * axes
    assert batch["input_ids"][1].tolist() == [0, 0, 0]


def test_type_ids_may_be_missing():
    without = {key: value for key, value in pack(3).items() if key != "mm_token_type_ids"}
    assert neat_packed_vlm_collater([without])["mm_token_type_ids"].tolist() == [[0, 0, 0]]


def test_inputs_are_not_changed():
    packs = [pack(3, 2, images=1)]
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in packs[0].items()}
    batch = neat_packed_vlm_collater(packs)
    batch["input_ids"].zero_()
    assert all(
        torch.equal(before[k], v) if isinstance(v, torch.Tensor) else before[k] == v for k, v in packs[0].items()
    )


class TestThd:
    def test_lengths_and_fill(self):
        packs = [
            pack(3, 1, seq_lens=[3, 1], seq_lens_padded=[3, 1]),
            pack(2, images=1, seq_lens=[2], seq_lens_padded=[2]),
        ]
        batch = packed_sequence_thd_vlm_collater(packs, max_length=6)
        assert batch["qkv_format"] == "thd"
        assert batch["seq_lens"].tolist() == [[3, 1], [2, -1000]]
        assert batch["seq_lens_padded"].tolist() == [[3, 3], [6, -1000]]
        assert not {"attention_mask", "mm_token_type_ids"} & set(batch)
        assert batch["pixel_values"].shape == (4, 6)

    def test_lengths_are_counted_in_the_mask(self):
        assert packed_sequence_thd_vlm_collater([pack(3, 1)])["seq_lens"].tolist() == [[3, 1]]
        assert packed_sequence_thd_vlm_collater([]) == {}

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"seq_lens": [4]}, "both or neither"),
            ({"seq_lens": [5], "seq_lens_padded": [4]}, "do not fit"),
            ({"seq_lens": [1, 1], "seq_lens_padded": [4]}, "do not fit"),
            ({"seq_lens": [3], "seq_lens_padded": [3]}, "add up to 3, but the pack has 4"),
        ],
    )
    def test_lengths_that_contradict(self, more, message):
        with pytest.raises(ValueError, match=message):
            packed_sequence_thd_vlm_collater([pack(4, **more)])

    def test_too_long(self):
        with pytest.raises(ValueError, match="more than max_length=3"):
            packed_sequence_thd_vlm_collater([pack(4)], max_length=3)
