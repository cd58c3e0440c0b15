"""Where a batch is cut, which media rows belong to each cut, and media tensors cut there.

Enters: pixels (a tensor, or a list of tensors where resolutions differ), what describes them, how many items each
sample owns. Leaves: half-open row ranges, and lists of slices (views) with an entry per micro-batch, empty where a
micro-batch is text only. Knows no batches.

The batch is cut where `torch.distributed.pipelining` cuts it (`tensor_split`: 7 rows in 3 are 3, 2, 2), because media
cut anywhere else reach the micro-batch of another sample.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from vlm_stream.errors import ConfigError

Bounds: TypeAlias = list[tuple[int, int]]
Counts: TypeAlias = torch.Tensor | Sequence[int]
Rows: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class MediaCutError(ConfigError, ValueError):
    """Media rows of a batch cannot be given to its micro-batches without guessing."""


def microbatch_bounds(batch_size: int, n_microbatches: int) -> Bounds:
    """Return the half-open sample range of each micro-batch, as `torch.tensor_split` makes them.

    >>> microbatch_bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    if n_microbatches < 1:
        raise MediaCutError(
            f"n_microbatches is {n_microbatches}, so there is nothing to cut media for; give at least 1."
        )
    if batch_size < n_microbatches:
        raise MediaCutError(
            f"A batch of {batch_size} rows cannot be cut into {n_microbatches} micro-batches: the pipeline schedule "
            f"would get fewer than it waits for. Use a batch size of at least {n_microbatches}."
        )
    small, rest = divmod(batch_size, n_microbatches)
    ends = list(accumulate(small + (1 if i < rest else 0) for i in range(n_microbatches)))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def as_counts(counts: Counts) -> list[int]:
    """Return counts as Python integers."""
    return [int(n) for n in (counts.tolist() if isinstance(counts, torch.Tensor) else counts)]


def samples_own(num_items: int, batch_size: int, counts: Counts | None, what: str) -> list[int]:
    """Return how many of `num_items` media items each sample owns.

    Without counts it is only known when there is one sample, or one item for each.
    """
    if counts is None:
        if batch_size == 1:
            return [num_items]
        if num_items == batch_size:
            return [1] * batch_size
        raise MediaCutError(
            f"VLM PP chunking cannot align {num_items} {what}s with {batch_size} samples: nothing says which sample "
            f"owns which. Let the collate function add n_{what}s_per_sample."
        )
    owned = as_counts(counts)
    if len(owned) != batch_size or sum(owned) != num_items or min(owned, default=0) < 0:
        raise MediaCutError(
            f"VLM PP chunking cannot align {num_items} {what}s with {batch_size} samples: n_{what}s_per_sample is "
            f"{owned} ({len(owned)} entries, sum {sum(owned)}), so some {what}s would reach the wrong micro-batch. "
            f"Make the counts match the media rows of the batch."
        )
    return owned


def owned_rows(num_rows: int, per_item: Sequence[Sequence[int]], what: str) -> list[int]:
    """Return how many of `num_rows` rows each item owns: the first proposal whose total is `num_rows`.

    Two proposals with the same total here are the same proposal (one row each, and grids of one patch each).
    """
    for proposal in per_item:
        if sum(proposal) == num_rows:
            return list(proposal)
    totals = " or ".join(str(sum(p)) for p in per_item)
    raise MediaCutError(
        f"VLM PP chunking cannot align {num_rows} pixel rows with {len(per_item[0])} {what}s, which would own {totals} "
        f"rows in total. The grid and the pixels of the batch do not belong together."
    )


def cut_rows(rows: Rows, sizes: Sequence[int], bounds: Bounds) -> list[Any]:
    """Return for each micro-batch the rows of its owners: owner `i` has `sizes[i]` rows, `bounds` are owner ranges."""
    starts = [0, *accumulate(sizes)]
    return [rows[starts[begin] : starts[end]] for begin, end in bounds]


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
