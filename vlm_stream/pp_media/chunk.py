"""One set of media tensors -> a list with an entry per micro-batch.

Enters: pixels (a tensor, or a list of tensors where resolutions differ), what describes them, and how many items each
sample owns. Leaves: lists of slices (views), empty where a micro-batch is text only. Knows no batches.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.pp_media.cut import (
    MediaCutError,
    as_counts,
    cut_rows,
    microbatch_bounds,
    owned_rows,
    samples_own,
)

if TYPE_CHECKING:
    from vlm_stream.pp_media.cut import Bounds, Counts, Rows

__all__ = ["chunk_crops", "chunk_step3_media", "chunk_vlm_media", "item_bounds", "patches_per_item"]


def item_bounds(owned: list[int], bounds: Bounds) -> Bounds:
    """Turn sample ranges into ranges of the media items that these samples own."""
    starts = [0, *accumulate(owned)]
    return [(starts[begin], starts[end]) for begin, end in bounds]


def patches_per_item(grid: torch.Tensor) -> list[int]:
    """Return the product of each row of a `[items, 2 or 3]` grid: how many flat patches the item owns."""
    return [int(n) for n in grid.prod(dim=-1).tolist()]


def chunk_vlm_media(
    pixel_values: Rows,
    image_grid: torch.Tensor,
    batch_size: int,
    n_microbatches: int,
    n_images_per_sample: Counts | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Cut pixels and their grid into one chunk per micro-batch.

    Four layouts, told apart by their totals and not by their rank:

    1. `[images, C, H, W]` (or more axes): a row per image.
    2. `[images, max_patches, D]`: a row of padded patches per image.
    3. `[patches, D]` or `[patches, C, P, P]`, flat over the batch: an image owns the product of its grid row.
    4. Any of these without counts, when there is one image for each sample (or one sample).

    A list of tensors is a row per image.

    Args:
        pixel_values: The pixels of the whole batch.
        image_grid: `[images, ...]` What describes each image: grid, size or position ids.
        batch_size: Samples in the batch.
        n_microbatches: Micro-batches that the schedule runs.
        n_images_per_sample: `[batch_size]` Images of each sample; decides whenever it is given.

    Returns:
        The pixel chunks and the grid chunks, `n_microbatches` of each.

    Raises:
        MediaCutError: The totals do not fit together (a `ValueError`).
    """
    bounds = microbatch_bounds(batch_size, n_microbatches)
    num_images = len(image_grid)
    images = item_bounds(samples_own(num_images, batch_size, n_images_per_sample, "image"), bounds)
    proposals = [[1] * num_images]
    if image_grid.ndim == 2 and isinstance(pixel_values, torch.Tensor):
        proposals.append(patches_per_item(image_grid))
    rows = owned_rows(len(pixel_values), proposals, "image")
    return cut_rows(pixel_values, rows, images), cut_rows(image_grid, [1] * num_images, images)


def chunk_step3_media(
    pixel_values: Rows,
    batch_size: int,
    n_microbatches: int,
    num_patches: Counts | None = None,
    patch_pixel_values: torch.Tensor | None = None,
    patch_newline_mask: torch.Tensor | None = None,
    *,
    n_images_per_sample: Counts | None = None,
) -> dict[str, list[Any]]:
    """Cut media that have no grid: full images, and crop patches that `num_patches` assigns to samples.

    Args:
        pixel_values: A row per sample, per image when `n_images_per_sample` says so, or `sum(num_patches)` flat rows.
        batch_size: Samples in the batch.
        n_microbatches: Micro-batches that the schedule runs.
        num_patches: `[batch_size]` Crop patches of each sample; none when it is not given.
        patch_pixel_values: `[sum(num_patches), ...]`
        patch_newline_mask: `[sum(num_patches)]`
        n_images_per_sample: `[batch_size]` Images of each sample, where a sample may have none or several.

    Returns:
        Lists under `pixel_values`, `num_patches` and the patch keys that were given.

    Raises:
        MediaCutError: The totals do not fit together (a `ValueError`).
    """
    bounds = microbatch_bounds(batch_size, n_microbatches)
    chunks = chunk_crops(bounds, num_patches, patch_pixel_values, patch_newline_mask)
    patches = [n for chunk in chunks["num_patches"] for n in chunk.tolist()]
    sizes = _step3_rows(pixel_values, patches, n_images_per_sample)
    return {"pixel_values": cut_rows(pixel_values, sizes, bounds), **chunks}


def chunk_crops(
    bounds: Bounds,
    num_patches: Counts | None = None,
    patch_pixel_values: torch.Tensor | None = None,
    patch_newline_mask: torch.Tensor | None = None,
) -> dict[str, list[Any]]:
    """Cut the crop patches that stand beside full images, by the number that each sample owns."""
    batch_size = bounds[-1][1]
    counts = torch.as_tensor([0] * batch_size if num_patches is None else num_patches)
    patches = as_counts(counts)
    if len(patches) != batch_size:
        raise MediaCutError(
            f"num_patches must have length {batch_size}, one entry per sample, and has {len(patches)}; crop patches "
            f"would reach the wrong micro-batch. Emit it per sample."
        )
    chunks: dict[str, list[Any]] = {"num_patches": [counts[begin:end] for begin, end in bounds]}
    for name, value in (("patch_pixel_values", patch_pixel_values), ("patch_newline_mask", patch_newline_mask)):
        if value is None:
            continue
        if len(value) != sum(patches):
            raise MediaCutError(
                f"{name} has {len(value)} rows and num_patches {patches} adds up to {sum(patches)}; the crops cannot "
                f"be given to their samples. Emit num_patches for the same images as {name}."
            )
        chunks[name] = cut_rows(value, patches, bounds)
    return chunks


def _step3_rows(pixel_values: Rows, patches: list[int], n_images_per_sample: Counts | None) -> list[int]:
    """Return how many pixel rows each sample owns, counts of images first, because B rows may still be uneven."""
    num_rows, batch_size = len(pixel_values), len(patches)
    images = None if n_images_per_sample is None else as_counts(n_images_per_sample)
    if images is not None and len(images) == batch_size and sum(images) == num_rows:
        return images
    # Rank 5 holds a padded axis of images, so its rows are samples whatever the counts say.
    one_each = images is None or (isinstance(pixel_values, torch.Tensor) and pixel_values.ndim >= 5)
    if num_rows == batch_size and one_each:
        return [1] * batch_size
    if sum(patches) == num_rows:
        return patches
    raise MediaCutError(
        f"VLM PP chunking cannot align pixel_values with num_patches: {num_rows} pixel rows, {batch_size} samples, "
        f"num_patches {patches} (sum {sum(patches)}), n_images_per_sample {images}. Emit a grid, or counts that add up."
    )
