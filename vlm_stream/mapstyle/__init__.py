"""The in-memory twins: datasets, samplers and packing for data that fits in memory, under the names of the reference.

Enters: a list of samples (or anything with `len` and item access) and a processor. Leaves: encoded samples, packs,
orders
of indices. The planning underneath is that of `plan`; nothing here has a second copy of it. Must not be known here:
shards, storage, streams.

    raw            the raw samples below wrappers, one at a time
    replace        which sample stands in for a bad one, and the note of it
    robust         RobustDatasetWrapper: conversations
    pretokenized   PreTokenizedDatasetWrapper: encoded samples
    sampler        LengthGroupedSampler: similar lengths side by side
    knapsack       greedy_knapsack, greedy_knapsack_vt_balanced
    packed         PackedDatasetWrapper: packs, made when they are asked for
    pack_sampler   BalancedPackSampler: an order of packs that is shuffled and keeps ranks even
    neat_packing   neat_pack_dataset_vlm: plan and wrap
"""

from vlm_stream.mapstyle.knapsack import greedy_knapsack, greedy_knapsack_vt_balanced
from vlm_stream.mapstyle.neat_packing import neat_pack_dataset_vlm
from vlm_stream.mapstyle.pack_sampler import BalancedPackSampler
from vlm_stream.mapstyle.packed import PackedDatasetWrapper
from vlm_stream.mapstyle.pretokenized import PreTokenizedDatasetWrapper
from vlm_stream.mapstyle.robust import RobustDatasetWrapper
from vlm_stream.mapstyle.robust_collate import make_robust_collate
from vlm_stream.mapstyle.sampler import LengthGroupedSampler

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
