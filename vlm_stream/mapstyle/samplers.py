"""Orders of samples and packs: `LengthGroupedSampler` and `BalancedPackSampler`.

Enters: a dataset with metadata for estimates, or packs with their visual loads. Leaves: indices. All ranks share seed
and epoch, so position n is a sample (or pack) of similar cost on each of them.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler, Subset

from vlm_stream.collate import estimate_sample_length, extract_image_config, extract_video_config
from vlm_stream.errors import ConfigError, StateError, nearest_name
from vlm_stream.plan import Key, permute_chunks, words

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
