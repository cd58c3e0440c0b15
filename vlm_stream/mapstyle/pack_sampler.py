"""`BalancedPackSampler`: an order of packs that is shuffled every epoch and keeps the ranks of a step even.

Enters: packs with their visual loads, a world size. Leaves: this rank's indices. Packs of similar load stand in one
block (the packs that all ranks take at the same time), and whole blocks are permuted: a plain shuffle would undo the
balance, and no shuffle would make a curriculum from text to vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from vlm_stream.errors import ConfigError
from vlm_stream.plan import Key, permute_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BalancedPackSampler"]


class BalancedPackSampler(Sampler[int]):
    """Indices of packs for one rank.

    Every rank gets the same number; what does not fill the last block is left over, other packs in every epoch.
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
        """Yield this rank's packs, a batch from each block."""
        count = len(self._by_load)
        spare = count % self._block
        # Another few packs are left over in every epoch, from all over the loads.
        key = Key(seed=self.seed, purpose="pack_blocks", epoch=self.epoch)
        skipped = permute_chunks(count, 1, key)[:spare]
        kept = np.delete(self._by_load, skipped)
        order = kept[permute_chunks(len(kept), self._block, Key(seed=self.seed, purpose="packs", epoch=self.epoch))]
        mine = order.reshape(-1, self.batch_size, self.num_replicas)[:, :, self.rank]  # similar packs share a row
        yield from mine.ravel().tolist()
