"""Batches lose their raw media, the first stage finds them again, and nothing is left behind."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from vlm_stream.pp_media import (
    VLM_PP_MEDIA_KEY,
    MediaCutError,
    drop_vlm_media,
    pp_chunk_specs,
    prepare_vlm_media_for_pp,
    stage_vlm_media_for_pp,
    take_vlm_media,
    wrap_vlm_collate_for_pp,
)

GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])
EIGHT_ATTRIBUTES = [
    "_vlm_pixel_values_chunks",
    "_vlm_image_grid_hws_chunks",
    "_vlm_num_patches_chunks",
    "_vlm_patch_pixel_values_chunks",
    "_vlm_patch_newline_mask_chunks",
    "_vlm_pixel_values_videos_chunks",
    "_vlm_video_grid_thw_chunks",
    "_vlm_chunk_idx",
]


def flat(grid: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(grid), dtype=torch.float32), grid.prod(-1))[:, None]


def media_batch(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(3, 5, dtype=torch.long),
        "pixel_values": flat(GRID),
        "image_grid_thw": GRID,
        "n_images_per_sample": torch.tensor([2, 0, 1]),
        **more,
    }


def test_images_videos_and_every_grid_are_cut() -> None:
    video_grid = torch.tensor([[2, 2, 2], [1, 2, 2]])
    batch = media_batch(
        image_sizes=torch.tensor([[10, 10], [20, 20], [30, 30]]),
        pixel_values_videos=flat(video_grid),
        video_grid_thw=video_grid,
        n_videos_per_sample=torch.tensor([0, 1, 1]),
        second_per_grid_ts=torch.tensor([0.5, 1.0]),
    )
    out = prepare_vlm_media_for_pp(batch, 3, 3)
    assert out is batch
    assert set(batch) == {"input_ids", VLM_PP_MEDIA_KEY}
    chunks = batch[VLM_PP_MEDIA_KEY]
    assert [len(c) for c in chunks["pixel_values"]] == [12, 0, 8]
    for name in ("image_grid_hws", "image_grid_thw", "image_sizes"):
        assert [len(c) for c in chunks[name]] == [2, 0, 1], name
    assert chunks["image_sizes"][2].tolist() == [[30, 30]]
    assert [len(c) for c in chunks["pixel_values_videos"]] == [0, 8, 4]
    assert [c.tolist() for c in chunks["second_per_grid_ts"]] == [[], [0.5], [1.0]]


def test_lists_of_pixels_and_of_seconds_are_cut_too() -> None:
    batch = media_batch(pixel_values=[torch.full((1, 2, 2), float(i)) for i in range(3)])
    chunks = prepare_vlm_media_for_pp(batch, 3, 2)[VLM_PP_MEDIA_KEY]
    assert [[int(p.max()) for p in chunk] for chunk in chunks["pixel_values"]] == [[0, 1], [2]]
    video_grid = torch.tensor([[1, 2, 2], [1, 2, 2]])
    videos = {"pixel_values_videos": flat(video_grid), "video_grid_thw": video_grid, "second_per_grid_ts": [0.5, 1.0]}
    chunks = prepare_vlm_media_for_pp(videos, 2, 2)[VLM_PP_MEDIA_KEY]
    assert chunks["second_per_grid_ts"] == [[0.5], [1.0]]


def test_frame_rows_are_cut_by_frames_per_video() -> None:
    batch = {
        "pixel_values_videos": torch.arange(8.0).reshape(8, 1, 1),
        "video_position_ids": torch.arange(8).reshape(8, 1, 1),
        "num_frames_per_video": torch.tensor([2, 5, 1]),
        "n_videos_per_sample": torch.tensor([1, 0, 2]),
    }
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert [len(c) for c in chunks["pixel_values_videos"]] == [2, 0, 6]
    assert [len(c) for c in chunks["video_position_ids"]] == [2, 0, 6]
    assert [c.tolist() for c in chunks["num_frames_per_video"]] == [[2], [], [5, 1]]


def test_crops_beside_a_grid_are_kept() -> None:
    batch = media_batch(num_patches=torch.tensor([1, 0, 2]), patch_pixel_values=torch.arange(3.0)[:, None])
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert [c.flatten().tolist() for c in chunks["patch_pixel_values"]] == [[0], [], [1, 2]]
    assert [len(c) for c in chunks["pixel_values"]] == [12, 0, 8]


def test_pixels_without_a_grid_go_by_sample() -> None:
    batch = {"pixel_values": torch.arange(4.0).reshape(4, 1, 1, 1), "num_patches": torch.tensor([0, 1, 0, 1])}
    chunks = prepare_vlm_media_for_pp(batch, 4, 2)[VLM_PP_MEDIA_KEY]
    assert [c.tolist() for c in chunks["num_patches"]] == [[0, 1], [0, 1]]


def test_text_only_batches_pass() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "n_images_per_sample": torch.zeros(2), "pixel_values": None}
    assert set(prepare_vlm_media_for_pp(batch, 2, 2)) == {"input_ids"}
    assert set(drop_vlm_media(prepare_vlm_media_for_pp(media_batch(), 3, 3))) == {"input_ids"}
    assert set(drop_vlm_media(media_batch())) == {"input_ids"}


def test_misfits_are_refused() -> None:
    with pytest.raises(MediaCutError, match=r"image_sizes, which has 2 rows, with media that have 3"):
        prepare_vlm_media_for_pp(media_batch(image_sizes=torch.zeros(2, 2)), 3, 3)
    with pytest.raises(ValueError, match=r"pixel_values_videos has 4 rows, and neither video_grid_thw .*\(None\)"):
        prepare_vlm_media_for_pp({"pixel_values_videos": torch.zeros(4, 3)}, 2, 2)
    with pytest.raises(ValueError, match="n_microbatches is 0"):
        prepare_vlm_media_for_pp({}, 2, 0)


def test_token_types_tell_when_images_are_not_one_each() -> None:
    """Two images of the first of two rows: as many as rows, and still not one each."""
    types = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])
    batch = {"pixel_values": flat(GRID[:2]), "image_grid_thw": GRID[:2], "mm_token_type_ids": types}
    with pytest.raises(MediaCutError, match=r"rows \[1\] have no tokens for them.*n_images_per_sample"):
        prepare_vlm_media_for_pp(dict(batch), 2, 2)
    counted = prepare_vlm_media_for_pp(batch | {"n_images_per_sample": torch.tensor([2, 0])}, 2, 2)
    assert [len(c) for c in counted[VLM_PP_MEDIA_KEY]["image_grid_thw"]] == [2, 0]
    video = torch.tensor([[1, 2, 2], [1, 2, 2]])
    clips = {"pixel_values_videos": flat(video), "video_grid_thw": video, "mm_token_type_ids": 2 * types}
    with pytest.raises(MediaCutError, match=r"cannot align pixel_values_videos with 2 samples: rows \[1\]"):
        prepare_vlm_media_for_pp(clips, 2, 2)


def test_collate_wrapper() -> None:
    wrapped = wrap_vlm_collate_for_pp(lambda rows: media_batch(), 3)
    assert VLM_PP_MEDIA_KEY in wrapped([])
    assert wrap_vlm_collate_for_pp(lambda rows: rows, 2)([1, 2]) == [1, 2]
    text = {"input_ids": torch.zeros(1, 1)}
    assert wrap_vlm_collate_for_pp(lambda rows: text, 2)([]) is text
    with pytest.raises(ValueError, match=r"media and no input_ids \(keys: pixel_values\)"):
        wrap_vlm_collate_for_pp(lambda rows: {"pixel_values": torch.zeros(1)}, 1)([])


class FakeStage:
    """Runs its module as torch's stages do: chunk number first."""

    is_first = True

    def __init__(self, part: torch.nn.Module) -> None:
        self.part = part

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...]) -> Any:
        return self.part(*args)


class ReadsOnlyWithMedia(torch.nn.Module):
    """Moves the cursor only when its micro-batch has media tokens: what some models in the field do."""

    def forward(self, has_media: bool) -> list[float] | None:
        if not has_media:
            return None
        return [float(v) for v in take_vlm_media(self, ("pixel_values",))["pixel_values"].flatten()]


def pipeline(part: torch.nn.Module, *, first: bool = True, stages: bool = True) -> Any:
    stage = [FakeStage(part)] if stages else None
    return SimpleNamespace(info=SimpleNamespace(has_first_stage=first, stages=stage, schedule=None))


def prepared() -> dict[str, Any]:
    return prepare_vlm_media_for_pp(media_batch(), 3, 3)


def test_staging_keeps_the_contract_and_cleans_up_after_errors() -> None:
    part, batch = ReadsOnlyWithMedia(), prepared()
    with contextlib.suppress(RuntimeError), stage_vlm_media_for_pp(pipeline(part), [part], batch):
        assert VLM_PP_MEDIA_KEY not in batch
        assert [len(c) for c in part._vlm_pixel_values_chunks] == [12, 0, 8]
        assert [len(c) for c in part._vlm_image_grid_hws_chunks] == [2, 0, 1]
        assert part._vlm_pixel_values_videos_chunks is None
        assert part._vlm_chunk_idx == 0
        raise RuntimeError("boom")
    assert all(getattr(part, name) is None for name in EIGHT_ATTRIBUTES)
    assert take_vlm_media(part, ("pixel_values",)) == {}


def test_the_cursor_names_the_micro_batch_whatever_ran_before() -> None:
    part, batch = ReadsOnlyWithMedia(), prepared()
    pp = pipeline(part)
    stage = pp.info.stages[0]
    with stage_vlm_media_for_pp(pp, [part], batch):
        assert part(True) == [0.0] * 4 + [1.0] * 8  # the forward that infers shapes
        assert stage.forward_one_chunk(0, (True,)) == [0.0] * 4 + [1.0] * 8
        assert stage.forward_one_chunk(1, (False,)) is None
        assert stage.forward_one_chunk(2, (True,)) == [2.0] * 8
    assert "forward_one_chunk" not in vars(stage)


def test_a_forward_that_always_takes_needs_no_stage_object() -> None:
    part, batch = torch.nn.Identity(), prepared()
    names = ("pixel_values", "image_grid_thw")
    with stage_vlm_media_for_pp(pipeline(part, stages=False), [part], batch):
        taken = [take_vlm_media(part, names) for _ in range(3)]
    assert [sorted(t) for t in taken] == [["image_grid_thw", "pixel_values"], [], ["image_grid_thw", "pixel_values"]]


def test_ranks_without_the_first_stage_get_no_media() -> None:
    part, batch = torch.nn.Identity(), prepared()
    with stage_vlm_media_for_pp(pipeline(part, first=False), [part], batch):
        assert VLM_PP_MEDIA_KEY not in batch
        assert not hasattr(part, "_vlm_pixel_values_chunks")


def test_positions_with_several_rows_are_cut_along_the_batch() -> None:
    specs = pp_chunk_specs({"position_ids": torch.zeros(4, 2, 3), "input_ids": torch.zeros(2, 3), "use_cache": False})
    assert (specs["position_ids"].split_dim, specs["input_ids"].split_dim) == (1, 0)
    assert pp_chunk_specs({"position_ids": torch.zeros(2, 3)})["position_ids"].split_dim == 0
    with_count = {"input_ids": torch.zeros(4, 3), "num_items_in_batch": torch.tensor(9)}
    split, kwargs = split_args_kwargs_into_chunks((), with_count, 2, kwargs_chunk_spec=pp_chunk_specs(with_count))
    assert [int(chunk["num_items_in_batch"]) for chunk in kwargs] == [9, 9]
    assert len(split) == 2
