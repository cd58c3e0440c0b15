"""Helpers for loops of one's own on torch: DDP, FSDP2, plain."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from vlm_stream.encode import IGNORE
from vlm_stream.errors import ConfigError

__all__ = ["count_items"]


def count_items(batches: Iterable[Mapping[str, Any]], group: Any = None) -> torch.Tensor:
    """Count the labels of a whole step, with one all-reduce: for steps whose batches have no `num_items_in_batch`.

    It counts what is in the batches, so bad samples are counted out. Every rank has to call it.

    Args:
        batches: All micro-batches of the step on this rank, with labels.
        group: The data-parallel process group; None: the default one. Without torch.distributed nothing is exchanged.

    Returns:
        A 0-d long tensor on the labels' device, the same on every rank, at least 1.

    Raises:
        ConfigError: There are no batches, or one has no labels.

    Example:
        >>> batches = [{"labels": torch.tensor([[-100, 5, 6]])}, {"labels": torch.tensor([[-100, -100, 7]])}]
        >>> count_items(batches)
        tensor(3)
    """
    found = [batch.get("labels") for batch in batches]
    labels = [each for each in found if isinstance(each, torch.Tensor)]
    if not labels or len(labels) < len(found):
        raise ConfigError(
            f"of {len(found)} batches {len(labels)} have labels, so the labels of the step cannot be counted; give all "
            f"micro-batches of the step, as the loader delivers them"
        )
    total = torch.stack([(each != IGNORE).sum() for each in labels]).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total.clamp(min=1)
