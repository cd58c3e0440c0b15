"""Estimates -> bins -> a dataset of packs: NeMo Automodel's neat packing, on the planner's best-fit decreasing.

Enters: lengths and a capacity, or an encoded dataset with the raw one below it for estimates. Leaves: lists of indices,
or a `PackedDatasetWrapper`. Nothing is encoded here.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_stream.collate import align_up
from vlm_stream.errors import ConfigError
from vlm_stream.mapstyle.samplers import estimate_lengths
from vlm_stream.mapstyle.wrappers import PackedDatasetWrapper
from vlm_stream.plan import best_fit_decreasing

Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


def greedy_knapsack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Pack samples by best-fit decreasing.

    Args:
        lengths: `[n]` Tokens of each sample.
        max_length: Capacity of a bin. Samples above it are left out, and a warning counts them.

    Returns:
        Bins in the order in which they were opened; their members longest first.

    >>> greedy_knapsack([3, 2, 4, 1], 5)
    [[2, 3], [0, 1]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    fits = np.flatnonzero(sizes <= max_length)
    if len(fits) < len(sizes):
        message = "%d of %d samples are longer than the capacity of %d tokens and are in no pack."
        logger.warning(message, len(sizes) - len(fits), len(sizes), max_length)
    if not len(fits):
        return []
    packs = best_fit_decreasing(sizes[fits], max_length)
    bins: list[list[int]] = [[] for _ in range(int(packs.max()) + 1)]
    for i in np.argsort(-sizes[fits], kind="stable"):
        bins[packs[i]].append(int(fits[i]))
    return bins


def greedy_knapsack_vt_balanced(
    lengths: Sequence[int], max_length: int, visual_tokens: Sequence[int]
) -> list[list[int]]:
    """Pack samples, then put bins of similar visual load side by side.

    Ranks that take neighbouring bins in the same step then run their vision towers for about the same time. The order
    is ascending; `BalancedPackSampler` shuffles it without pulling neighbours apart.

    Args:
        lengths: `[n]` Tokens of each sample, media included.
        max_length: Capacity of a bin.
        visual_tokens: `[n]` Media tokens of each sample.

    Returns:
        The bins of `greedy_knapsack`, by ascending visual tokens.
    """
    bins = greedy_knapsack(lengths, max_length)
    loads = _visual_load(bins, visual_tokens)
    if len(bins):
        spread = loads.mean(), loads.std(), loads.min(), loads.max()
        logger.info("Visual tokens per pack: mean %.1f, spread %.1f, min %d, max %d.", *spread)
    return [bins[i] for i in np.argsort(loads, kind="stable")]


def _visual_load(bins: Sequence[Sequence[int]], visual_tokens: Sequence[int]) -> Ints:
    """Return `[bins]` the visual tokens of each bin."""
    return np.asarray([sum(int(visual_tokens[i]) for i in members) for members in bins], dtype=np.int64)


def neat_pack_dataset_vlm(
    dataset: Any,
    pack_size: int,
    padding_idx: int = 0,
    drop_long_samples: bool = False,
    max_packs: int | None = None,
    get_rope_index: Callable[..., Any] | None = None,
    ds_raw: Any = None,
    packing_ratio: float = 1.0,
    processor: Any = None,
    balance_media_tokens: bool = True,
    sequence_alignment: int = 1,
) -> PackedDatasetWrapper:
    """Plan packs for a dataset from estimates.

    Args:
        dataset: Encoded samples, such as a `PreTokenizedDatasetWrapper`.
        pack_size: The most tokens of a pack, after the shift.
        padding_idx: Token that fills aligned documents.
        drop_long_samples: Leave samples out whose estimate is above `pack_size`; otherwise each gets a pack of its own.
        max_packs: Keep so many packs, spread evenly over the visual loads of all.
        get_rope_index: A model's method, a `PositionRule`, or None for plain positions.
        ds_raw: Raw samples, for estimates; without them every sample counts as half a pack.
        packing_ratio: Share of a pack that is planned full; below 1 leaves room for estimates that are too low.
        processor: What turns image and video sizes into tokens.
        balance_media_tokens: Put packs of similar visual load side by side; `BalancedPackSampler` keeps it so when the
            order is shuffled.
        sequence_alignment: Documents are padded to a multiple of it.

    Returns:
        The packs; their estimated visual tokens are in `visual_loads`.
    """
    capacity = int(pack_size * packing_ratio)
    if sequence_alignment < 1 or capacity < sequence_alignment:
        raise ConfigError(
            f"pack_size={pack_size} with packing_ratio={packing_ratio} and sequence_alignment={sequence_alignment} "
            f"leaves room for no document. Give an alignment of at least 1 and a larger pack."
        )
    if ds_raw is None:
        # Nothing is known of the samples: half a pack each, without media.
        half = min(align_up(capacity // 2, sequence_alignment), capacity)
        lengths, media = np.full(len(dataset), half, np.int64), np.zeros(len(dataset), np.int64)
    else:
        lengths, media = estimate_lengths(ds_raw, processor)
        lengths = align_up(np.maximum(lengths - 1, 0), sequence_alignment)  # the shift takes one token
    indices = np.arange(len(lengths))
    if drop_long_samples:
        indices = np.flatnonzero(lengths <= pack_size)
        if len(indices) < len(lengths):
            num_dropped = len(lengths) - len(indices)
            logger.warning("%d of %d samples are dropped: more than %d tokens.", num_dropped, len(lengths), pack_size)
    lengths, media = np.minimum(lengths[indices], capacity), media[indices]
    if balance_media_tokens and media.any():
        bins = greedy_knapsack_vt_balanced(lengths.tolist(), capacity, media.tolist())
    else:
        bins = greedy_knapsack(lengths.tolist(), capacity)
    bins = _cut_fairly(bins, max_packs, media)
    packed = PackedDatasetWrapper(
        dataset,
        [[int(indices[i]) for i in members] for members in bins],
        pack_size,
        padding_idx,
        get_rope_index,
        sequence_alignment=sequence_alignment,
    )
    packed.visual_loads = _visual_load(bins, media.tolist()).tolist()
    return packed


def _cut_fairly(bins: list[list[int]], max_packs: int | None, media: Ints) -> list[list[int]]:
    """Keep `max_packs` bins, spread evenly over all visual loads: neither the lightest nor the heaviest alone."""
    if max_packs is None or len(bins) <= max_packs:
        return bins
    by_load = np.argsort(_visual_load(bins, media.tolist()), kind="stable")
    # The middle of each of max_packs equal stretches of the sorted bins.
    places = ((2 * np.arange(max_packs) + 1) * len(bins)) // (2 * max_packs)
    kept = np.sort(by_load[places])
    lost = len(bins) - len(kept)
    samples = sum(map(len, bins)) - sum(len(bins[i]) for i in kept)
    logger.warning("max_packs=%d leaves out %d packs with %d samples.", max_packs, lost, samples)
    return [bins[i] for i in kept]
