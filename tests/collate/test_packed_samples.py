"""Shift, join, align: the packed sample of trainers that take document masks or THD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.collate import (
    PACKED_MEDIA_KEYS,
    MediaJoinError,
    PositionRule,
    build_packed_vlm_sample,
    count_documents,
    merge_media,
    shift_sample,
)
from vlm_stream.collate.documents import cu_seqlens
from vlm_stream.errors import BadSampleError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def plain(n: int, first: int = 0, **more: Any) -> dict[str, Any]:
    ids = torch.arange(first, first + n)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones(n, dtype=torch.long), **more}


def test_shift_moves_labels_and_keeps_media() -> None:
    grid = torch.tensor([[1, 2, 2]])
    sample = plain(5, mm_token_type_ids=torch.tensor([[0, 1, 1, 0, 0]]), image_grid_thw=grid, pixel_values=None)
    shifted = shift_sample(sample | {"position_ids": torch.arange(15).reshape(3, 5)}, has_mrope=True)
    assert shifted["input_ids"].tolist() == [0, 1, 2, 3]
    assert shifted["labels"].tolist() == [1, 2, 3, 4]
    assert shifted["attention_mask"].tolist() == [1] * 4
    assert shifted["mm_token_type_ids"].tolist() == [0, 1, 1, 0]
    assert shifted["position_ids"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13]]
    assert shifted["image_grid_thw"] is grid
    assert "pixel_values" not in shifted
    assert "position_ids" not in shift_sample(sample | {"position_ids": torch.zeros(3, 5)})


def test_documents_are_numbered_and_positions_restart() -> None:
    pack = build_packed_vlm_sample([shift_sample(plain(4)), shift_sample(plain(3, 10))], 16, 0)
    assert pack["input_ids"].tolist() == [0, 1, 2, 10, 11]
    assert pack["labels"].tolist() == [1, 2, 3, 11, 12]
    assert pack["attention_mask"].tolist() == [1, 1, 1, 2, 2]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert pack["mm_token_type_ids"].tolist() == [0] * 5
    assert (pack["seq_lens"], pack["seq_lens_padded"]) == ([3, 2], [3, 2])
    assert (pack["n_images"], pack["n_videos"]) == (0, 0)
    assert all(pack[key] is None for key in PACKED_MEDIA_KEYS)
    assert all(pack[key].dtype == torch.int64 for key in ("input_ids", "labels", "attention_mask", "mm_token_type_ids"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8), st.booleans())
def test_alignment_holds_for_plain_and_multi_axis_positions(lengths: list[int], alignment: int, mrope: bool) -> None:
    samples = [plain(n) | ({"position_ids": torch.arange(n).expand(3, -1) * 2} if mrope else {}) for n in lengths]
    pack = build_packed_vlm_sample(samples, 10_000, 7, mrope, alignment)
    slots = pack["seq_lens_padded"]
    assert pack["seq_lens"] == lengths
    assert all(n % alignment == 0 and 0 <= n - real < alignment for n, real in zip(slots, lengths, strict=True))
    assert count_documents(pack["attention_mask"]) == slots
    assert pack["position_ids"].shape == ((3, sum(slots)) if mrope else (sum(slots),))
    begin = 0
    for real, n in zip(lengths, slots, strict=True):
        assert pack["input_ids"][begin + real : begin + n].tolist() == [7] * (n - real)
        assert pack["labels"][begin + real : begin + n].tolist() == [-100] * (n - real)
        own = pack["position_ids"][..., begin : begin + n]
        assert (own.diff(dim=-1) > 0).all()
        assert (own[..., 0] == 0).all()
        begin += n


def test_multi_axis_positions_survive_alignment_on_a_real_sample(kinds: Callable[..., Any]) -> None:
    samples = kinds("qwen2_5_vl")
    rule = PositionRule(merge_size=2, frames_apart=False, tokens_per_second=2)
    shifted = [shift_sample(s | {"position_ids": rule(s)}, True) for s in (samples["images"], samples["video"])]
    pack = build_packed_vlm_sample(shifted, 4096, 0, True, 8)
    first, second = pack["seq_lens"]
    start = pack["seq_lens_padded"][0]
    assert torch.equal(pack["position_ids"][:, :first], rule(samples["images"])[:, :-1])
    assert torch.equal(pack["position_ids"][:, start : start + second], rule(samples["video"])[:, :-1])
    assert (pack["n_images"], pack["n_videos"]) == (3, 1)


def test_fake_images_become_a_document_that_nobody_sees(kinds: Callable[..., Any]) -> None:
    samples = kinds("qwen2_5_vl")
    pack = build_packed_vlm_sample([shift_sample(samples[k]) for k in ("faked", "faked", "short")], 4096, 0)
    text, fake = len(samples["text"]["input_ids"]) - 1, int((samples["faked"]["attention_mask"] == 0).sum())
    assert pack["seq_lens"] == [text, text, len(samples["short"]["input_ids"]) - 1, fake]
    assert torch.equal(pack["input_ids"][:text], samples["text"]["input_ids"][:-1])
    assert (pack["labels"][-fake:] == -100).all()
    assert pack["n_images"] == 1


def test_media_join_in_order() -> None:
    parts = [{"pixel_values": torch.full((2, 3), float(i)), "second_per_grid_ts": [float(i)]} for i in range(3)]
    merged = merge_media([plain(2) | part for part in parts])
    assert merged["pixel_values"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert merged["second_per_grid_ts"].tolist() == [0.0, 1.0, 2.0]
    lists = [{"pixel_values": [torch.zeros(3, i, i)] * i} for i in (1, 2)]
    assert [tuple(p.shape) for p in merge_media(lists)["pixel_values"]] == [(3, 1, 1), (3, 2, 2), (3, 2, 2)]
    with pytest.raises(TypeError, match="'pixel_values' is a tensor in some samples of a pack and a list in others"):
        merge_media([parts[0], lists[0]])
    with pytest.raises(MediaJoinError, match=r"different rank in one pack \(\(3,\), \(3, 4\)\)"):
        merge_media([parts[0], {"pixel_values": torch.zeros(1, 3, 4)}])
    tiles = [{"pixel_values": torch.ones(1, n, 2, side)} for n, side in ((3, 2), (5, 1))]
    joined = merge_media(tiles)["pixel_values"]
    assert joined.shape == (2, 5, 2, 2)
    assert (joined[0, :3].all(), joined[0, 3:].any()) == (True, False)
    assert (joined[1, :, :, 0].all(), joined[1, :, :, 1].any()) == (True, False)


def test_empty_and_overlong_packs_do_not_exist() -> None:
    with pytest.raises(BadSampleError, match="None of the 1 samples of a pack has a token"):
        build_packed_vlm_sample([shift_sample(plain(1))], 8, 0)
    with pytest.raises(
        BadSampleError, match=r"2 documents of a pack have 12 tokens \(\[4, 8\]\), more than pack_size 11"
    ):
        build_packed_vlm_sample([plain(3), plain(5)], 11, 0, False, 4)
    with pytest.raises(ConfigError, match="sequence_alignment is 0"):
        build_packed_vlm_sample([plain(3)], 8, 0, False, 0)
    assert build_packed_vlm_sample([shift_sample(plain(1)), plain(2)], 8, 0)["seq_lens"] == [2]


def test_cumulative_lengths() -> None:
    assert cu_seqlens([3, 1, 2]).tolist() == [0, 3, 4, 6]
    assert count_documents(torch.zeros(3, dtype=torch.long)) == []
