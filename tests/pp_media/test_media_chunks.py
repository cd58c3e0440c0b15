"""Media are cut where torch cuts the batch, for every layout, and what cannot be aligned is refused with its counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from vlm_stream.errors import ConfigError
from vlm_stream.pp_media import MediaCutError, chunk_step3_media, chunk_vlm_media, microbatch_bounds


def torch_cut(batch_size: int, n: int) -> list[list[int]]:
    """Ask torch itself which samples each micro-batch gets."""
    _, kwargs = split_args_kwargs_into_chunks((), {"sample": torch.arange(batch_size)}, n)
    return [chunk["sample"].tolist() for chunk in kwargs]


@st.composite
def cuts(draw: st.DrawFn, max_images: int = 3) -> tuple[int, int, list[int]]:
    batch_size = draw(st.integers(1, 9))
    n = draw(st.integers(1, batch_size))
    return batch_size, n, draw(st.lists(st.integers(0, max_images), min_size=batch_size, max_size=batch_size))


@given(cuts())
def test_bounds_are_torchs_own(cut: tuple[int, int, list[int]]) -> None:
    batch_size, n, _ = cut
    assert [list(range(*bounds)) for bounds in microbatch_bounds(batch_size, n)] == torch_cut(batch_size, n)


def make_layout(layout: str, num_images: int) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor, list[int]]:
    """Return pixels whose values are the number of their image, the grid, and the rows of each image."""
    grid = torch.tensor([[1, 2 + i % 2, 2 + 2 * (i % 3)] for i in range(num_images)]).reshape(-1, 3)
    one_each = torch.arange(num_images, dtype=torch.float32)
    rows = [1] * num_images
    if layout == "image":
        return one_each[:, None, None, None].expand(-1, 3, 4, 4), grid, rows
    if layout == "padded":
        return one_each[:, None, None].expand(-1, 6, 5), grid, rows
    if layout == "list":
        return [torch.full((3, 2 + i % 2, 4), float(i)) for i in range(num_images)], grid, rows
    rows = grid.prod(-1).tolist()
    owner = torch.repeat_interleave(one_each, torch.tensor(rows, dtype=torch.long))
    return (
        (owner[:, None].expand(-1, 7) if layout == "flat" else owner[:, None, None, None].expand(-1, 3, 2, 2)),
        grid,
        rows,
    )


@settings(deadline=None)
@pytest.mark.parametrize("layout", ["image", "padded", "flat", "flat4d", "list"])
@given(cut=cuts())
def test_every_image_reaches_the_micro_batch_of_its_sample(layout: str, cut: tuple[int, int, list[int]]) -> None:
    batch_size, n, counts = cut
    pixels, grid, rows = make_layout(layout, sum(counts))
    pixel_chunks, grid_chunks = chunk_vlm_media(pixels, grid, batch_size, n, torch.tensor(counts))
    owners = torch.repeat_interleave(torch.arange(batch_size), torch.tensor(counts)).tolist()
    assert len(pixel_chunks) == len(grid_chunks) == n
    for samples, pixel_chunk, grid_chunk in zip(torch_cut(batch_size, n), pixel_chunks, grid_chunks, strict=True):
        images = [i for i, owner in enumerate(owners) if owner in samples]
        assert torch.equal(grid_chunk, grid[images])
        seen = [float(row.flatten()[0]) for row in pixel_chunk]
        assert seen == [float(i) for i in images for _ in range(rows[i])]


@pytest.mark.parametrize("layout", ["image", "padded", "flat", "flat4d", "list"])
def test_one_image_per_sample_needs_no_counts(layout: str) -> None:
    pixels, grid, _ = make_layout(layout, 7)
    chunks, grids = chunk_vlm_media(pixels, grid, 7, 3)
    assert [len(g) for g in grids] == [3, 2, 2]
    assert [sorted({int(row.flatten()[0]) for row in chunk}) for chunk in chunks] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("layout", ["image", "padded", "flat"])
def test_two_images_of_the_first_sample_stay_with_it(layout: str) -> None:
    pixels, grid, rows = make_layout(layout, 2)
    chunks, grids = chunk_vlm_media(pixels, grid, 2, 2, torch.tensor([2, 0]))
    assert [len(g) for g in grids] == [2, 0]
    assert [len(c) for c in chunks] == [sum(rows), 0]


def test_padded_images_with_uneven_counts() -> None:
    pixels, grid, _ = make_layout("padded", 10)
    chunks, _ = chunk_vlm_media(pixels, grid, 3, 3, [3, 6, 1])
    assert [len(c) for c in chunks] == [3, 6, 1]


def test_a_single_pack_owns_all_media() -> None:
    pixels, grid, _ = make_layout("flat", 4)
    chunks, grids = chunk_vlm_media(pixels, grid, 1, 1)
    assert torch.equal(chunks[0], pixels)
    assert torch.equal(grids[0], grid)


def test_refusals_name_the_counts() -> None:
    pixels, grid, _ = make_layout("flat", 3)
    with pytest.raises(ValueError, match=r"cannot align 3 images with 2 samples: nothing says.*n_images_per_sample"):
        chunk_vlm_media(pixels, grid, 2, 2)
    with pytest.raises(MediaCutError, match=r"cannot align 3 images .* \[1, 1\] \(2 entries, sum 2\)"):
        chunk_vlm_media(pixels, grid, 2, 2, torch.tensor([1, 1]))
    with pytest.raises(MediaCutError, match=r"\[3\] \(1 entries, sum 3\)"):
        chunk_vlm_media(pixels, grid, 2, 2, torch.tensor([3]))
    with pytest.raises(ConfigError, match=r"cannot align 5 pixel rows with 3 images, which would own 3 or 28 rows"):
        chunk_vlm_media(pixels[:5], grid, 2, 2, torch.tensor([2, 1]))
    with pytest.raises(MediaCutError, match="batch of 2 rows cannot be cut into 3 micro-batches"):
        chunk_vlm_media(pixels, grid, 2, 3, torch.tensor([2, 1]))
    with pytest.raises(MediaCutError, match="n_microbatches is 0"):
        microbatch_bounds(2, 0)


def test_step3_full_images_and_crops() -> None:
    images, crops = torch.arange(5.0).reshape(5, 1, 1, 1), torch.arange(6.0).reshape(6, 1, 1, 1)
    newline = torch.arange(6)
    chunks = chunk_step3_media(images, 5, 3, torch.tensor([2, 0, 1, 3, 0]), crops, newline)
    assert [c.flatten().tolist() for c in chunks["pixel_values"]] == [[0, 1], [2, 3], [4]]
    assert [c.tolist() for c in chunks["num_patches"]] == [[2, 0], [1, 3], [0]]
    assert [c.flatten().tolist() for c in chunks["patch_pixel_values"]] == [[0, 1], [2, 3, 4, 5], []]
    assert [c.tolist() for c in chunks["patch_newline_mask"]] == [[0, 1], [2, 3, 4, 5], []]


def test_step3_defaults_and_flat_patches() -> None:
    chunks = chunk_step3_media(torch.arange(4.0)[:, None], 4, 2)
    assert set(chunks) == {"pixel_values", "num_patches"}
    assert [c.tolist() for c in chunks["num_patches"]] == [[0, 0], [0, 0]]
    flat = chunk_step3_media(torch.arange(6.0)[:, None], 3, 3, [1, 3, 2])
    assert [c.flatten().tolist() for c in flat["pixel_values"]] == [[0], [1, 2, 3], [4, 5]]


def test_step3_rows_follow_image_counts_when_they_are_known() -> None:
    images = torch.arange(2.0).reshape(2, 1, 1, 1)
    uneven = chunk_step3_media(images, 2, 2, n_images_per_sample=torch.tensor([2, 0]))
    assert [len(c) for c in uneven["pixel_values"]] == [2, 0]
    padded_axis = torch.zeros(2, 3, 1, 1, 1)
    by_sample = chunk_step3_media(padded_axis, 2, 2, n_images_per_sample=torch.tensor([3, 1]))
    assert [len(c) for c in by_sample["pixel_values"]] == [1, 1]


def test_step3_refusals() -> None:
    images = torch.zeros(3, 3, 2, 2)
    with pytest.raises(ValueError, match="num_patches must have length 3, one entry per sample, and has 2"):
        chunk_step3_media(images, 3, 3, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"cannot align pixel_values with num_patches: 3 pixel rows, 2 samples"):
        chunk_step3_media(images, 2, 2)
    with pytest.raises(ValueError, match=r"3 pixel rows, 3 samples, .* n_images_per_sample \[1, 1, 0\]"):
        chunk_step3_media(images, 3, 3, n_images_per_sample=torch.tensor([1, 1, 0]))
    with pytest.raises(ValueError, match=r"patch_pixel_values has 3 rows and num_patches \[1, 0, 1\] adds up to 2"):
        chunk_step3_media(images, 3, 3, torch.tensor([1, 0, 1]), images)
