"""Estimates of lengths -> orders of samples, packs, orders of packs; on the planner's best-fit decreasing.

Enters: a dataset with metadata for estimates, or packs with their visual loads. Leaves: indices, or a
`PackedDatasetWrapper`; nothing is encoded here. All ranks share seed and epoch, so position n is a sample (or pack) of
similar cost on each of them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler, Subset

from vlm_stream.collate import align_up, estimate_sample_length, extract_image_config, extract_video_config
from vlm_stream.errors import ConfigError, StateError, nearest_name
from vlm_stream.mapstyle.wrappers import PackedDatasetWrapper
from vlm_stream.plan import Key, best_fit_decreasing, permute_chunks, words

Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_SLACK_TOKENS: Final = 512
"""By how much an estimate may exceed `max_length` before its sample is left out; the exact length may still fit."""
_ORDERS: Final = ("permute", "rotate")


def raw_dataset(dataset: Any) -> Any:
    """Follow `.dataset` down to what is wrapped; its samples hold conversations and metadata.

    What a `Subset` on the way chooses stays chosen: sample i below is sample i above.
    """
    chosen: list[int] | None = None
    while hasattr(dataset, "dataset"):
        if isinstance(dataset, Subset):
            own = dataset.indices
            chosen = [own[i] for i in (range(len(own)) if chosen is None else chosen)]
        dataset = dataset.dataset
    return dataset if chosen is None else Subset(dataset, chosen)


def estimate_lengths(samples: Any, processor: Any = None) -> tuple[Ints, Ints]:
    """Return `[n]` tokens of each sample by NeMo Automodel's approximations, and how many of them stand for media.

    Samples are looked at one by one and not kept, so a dataset that decodes on access is never held in memory.
    """
    configs = extract_image_config(processor), extract_video_config(processor)
    pairs = [estimate_sample_length(samples[i], *configs, return_media_tokens=True) for i in range(len(samples))]
    table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class LengthGroupedSampler(Sampler[int]):
    """Indices by descending length, rotated by whole batches.

    Attributes:
        lengths, text_lengths, media_lengths: Estimates of all samples.
        sorted_indices: The samples that are delivered, longest first.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int = 42,
        processor: Any = None,
        max_length: int | None = None,
        batch_size: int = 1,
        *,
        order: str = "rotate",
    ) -> None:
        """Estimate and sort.

        Args:
            dataset: Samples with a `conversation`, perhaps below wrappers.
            seed: The same on every rank.
            processor: What turns image and video sizes into tokens.
            max_length: Samples whose estimate is more than 512 tokens above it are left out, and counted in the log.
            batch_size: Samples that must stay side by side.
            order: `rotate` the sorted order, or `permute` its batches.
        """
        if order not in _ORDERS:
            raise ConfigError(f"order={order!r} means nothing here; {nearest_name(order, _ORDERS)}")
        self.seed, self.batch_size, self.order = seed, max(1, batch_size), order
        self.epoch = 0
        self._position = 0
        self._image_cfg, self._video_cfg = extract_image_config(processor), extract_video_config(processor)
        total, media = estimate_lengths(raw_dataset(dataset), processor)
        self.lengths: list[int] = total.tolist()
        self.media_lengths: list[int] = media.tolist()
        self.text_lengths: list[int] = (total - media).tolist()
        kept = np.arange(len(total)) if max_length is None else np.flatnonzero(total <= max_length + _SLACK_TOKENS)
        if len(kept) < len(total):
            logger.warning(
                "%d of %d samples are left out: too long for %s.", len(total) - len(kept), len(total), max_length
            )
        by_length = kept[np.argsort(-total[kept], kind="stable")]
        self.sorted_indices: list[int] = align_ranks(by_length).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the same one gives the same order."""
        self.epoch, self._position = epoch, 0

    def __len__(self) -> int:
        return len(self.sorted_indices)

    def __iter__(self) -> Iterator[int]:
        order = self._epoch_order()
        start, self._position = self._position, 0
        for position in range(start, len(order)):
            self._position = position + 1
            yield order[position]
        self._position = 0

    def _epoch_order(self) -> list[int]:
        """Return the order of this epoch; a short last batch stays last, or it would shift those after it."""
        num_full = len(self.sorted_indices) // self.batch_size
        body = np.asarray(self.sorted_indices[: num_full * self.batch_size]).reshape(num_full, self.batch_size)
        if self.order == "permute":
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            body = body[torch.randperm(num_full, generator=generator).numpy()]
        elif num_full:
            word = words(Key(seed=self.seed, purpose="rotate", epoch=self.epoch), 1)[0]
            body = np.roll(body, -(int(word) % num_full), axis=0)
        return [*body.ravel().tolist(), *self.sorted_indices[num_full * self.batch_size :]]

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands, with what proves that a state fits."""
        return {"version": 1, "epoch": self.epoch, "position": self._position, **self._terms()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state stood: the next iteration begins there.

        Raises:
            StateError: It is of another version, dataset or configuration.
        """
        if state.get("version") != 1:
            raise StateError(
                f"A sampler state of version {state.get('version')} cannot be read; this one writes version 1."
            )
        wrong = {k: (state.get(k), v) for k, v in self._terms().items() if state.get(k) != v}
        if wrong:
            said = ", ".join(f"{k} was {old} and is {new}" for k, (old, new) in wrong.items())
            raise StateError(
                f"The state belongs to another run ({said}); its position means nothing here. Start again."
            )
        self.epoch, self._position = int(state["epoch"]), int(state["position"])

    def _terms(self) -> dict[str, Any]:
        terms = {"seed": self.seed, "batch_size": self.batch_size, "order": self.order}
        return {**terms, "num_samples": len(self.sorted_indices)}

    _extract_image_config = staticmethod(extract_image_config)
    _extract_video_config = staticmethod(extract_video_config)

    def _estimate_tokens(self, example: Any) -> tuple[int, int]:
        both = estimate_sample_length(example, self._image_cfg, self._video_cfg, return_media_tokens=True)
        total, media = both if isinstance(both, tuple) else (both, 0)
        return total - media, media


def align_ranks(by_length: Ints) -> Ints:
    """Leave samples out, evenly over the lengths, until every rank of the process group has the same number."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return by_length
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    least = torch.tensor([len(by_length)], device=device)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    target, count = int(least.item()), len(by_length)
    if target == count:
        return by_length
    logger.warning("%d of %d samples are left out: another rank has only %d.", count - target, count, target)
    places = ((2 * np.arange(target) + 1) * count) // (2 * max(target, 1))
    return by_length[places]


class BalancedPackSampler(Sampler[int]):
    """Indices of packs for one rank, shuffled every epoch, with even loads over the ranks of a step.

    Packs of similar visual load are in one block (the packs that all ranks take at the same time), and whole blocks are
    permuted: a plain shuffle would undo the balance, and no shuffle would make a curriculum from text to vision. Every
    rank gets the same number; what does not fill the last block is left over, other packs in every epoch.
    """

    def __init__(self, packs: Any, num_replicas: int = 1, rank: int = 0, batch_size: int = 1, seed: int = 42) -> None:
        """Sort the packs by visual load.

        Args:
            packs: A `PackedDatasetWrapper` of `neat_pack_dataset_vlm`, which knows its `visual_loads`.
            num_replicas: Data-parallel ranks.
            rank: This one.
            batch_size: Packs that a rank takes at once.
            seed: The same on every rank.
        """
        if packs.visual_loads is None:
            raise ConfigError(
                "These packs do not know their visual loads, so nothing can be balanced. Build them with "
                "neat_pack_dataset_vlm and ds_raw."
            )
        if not 0 <= rank < num_replicas:
            raise ConfigError(
                f"rank {rank} does not exist among {num_replicas} replicas; give 0 to {num_replicas - 1}."
            )
        self.num_replicas, self.rank, self.batch_size = num_replicas, rank, batch_size
        self.seed = seed
        self.epoch = 0
        self._by_load = np.argsort(np.asarray(packs.visual_loads), kind="stable")
        self._block = num_replicas * batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the same one gives the same order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._by_load) // self._block * self.batch_size

    def __iter__(self) -> Iterator[int]:
        count = len(self._by_load)
        spare = count % self._block
        # Another few packs are left over in every epoch, from all over the loads.
        key = Key(seed=self.seed, purpose="pack_blocks", epoch=self.epoch)
        skipped = permute_chunks(count, 1, key)[:spare]
        kept = np.delete(self._by_load, skipped)
        order = kept[permute_chunks(len(kept), self._block, Key(seed=self.seed, purpose="packs", epoch=self.epoch))]
        mine = order.reshape(-1, self.batch_size, self.num_replicas)[:, :, self.rank]  # similar packs share a row
        yield from mine.ravel().tolist()


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
