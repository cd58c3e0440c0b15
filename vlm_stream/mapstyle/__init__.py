"""NeMo Automodel's in-memory datasets, samplers and packing, for data that fits in memory, under its names.

Enters: a list of samples (or anything with `len` and item access) and a processor. Leaves: encoded samples, packs,
orders of indices. Lengths are NeMo Automodel's approximations (`tokens/estimate.py`); the planning is that of `plan`.
Must not be known here: shards, storage, streams.

    replace   which sample takes the place of a bad one; make_robust_collate, the same for batches
    wrappers  RobustDatasetWrapper, PreTokenizedDatasetWrapper, PackedDatasetWrapper
    samplers  LengthGroupedSampler, BalancedPackSampler
    packing   greedy_knapsack, greedy_knapsack_vt_balanced, neat_pack_dataset_vlm
"""

from vlm_stream.mapstyle.packing import greedy_knapsack, greedy_knapsack_vt_balanced, neat_pack_dataset_vlm
from vlm_stream.mapstyle.replace import make_robust_collate
from vlm_stream.mapstyle.samplers import BalancedPackSampler, LengthGroupedSampler
from vlm_stream.mapstyle.wrappers import (
    PackedDatasetWrapper,
    PreTokenizedDatasetWrapper,
    RobustDatasetWrapper,
)

__all__ = [
    "BalancedPackSampler",
    "LengthGroupedSampler",
    "PackedDatasetWrapper",
    "PreTokenizedDatasetWrapper",
    "RobustDatasetWrapper",
    "greedy_knapsack",
    "greedy_knapsack_vt_balanced",
    "make_robust_collate",
    "neat_pack_dataset_vlm",
]
