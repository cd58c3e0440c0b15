"""The memory that large media are joined in: in a worker process, memory that its parent can map.

What a worker makes goes to its parent in any case; joined in its own memory first, it would be copied once more, and
pixels are the largest thing that a worker touches.
"""

from __future__ import annotations

import multiprocessing
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from vlm_stream.blocks import allocate_block

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["allocate", "is_worthwhile"]

_LARGE_BYTES: Final = 1 << 20  # below, a copy costs less than a segment


def is_worthwhile(num_bytes: int) -> bool:
    """Tell whether so much is to be joined where the parent can read it.

    A daemonic process is a worker: torch's, or ours. Ranks that a launcher starts are not.
    """
    return num_bytes >= _LARGE_BYTES and multiprocessing.current_process().daemon


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zeros: bool) -> torch.Tensor:
    """Return a tensor of zeros, or, where they are not needed, of anything."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not is_worthwhile(num_bytes):
        return (torch.zeros if zeros else torch.empty)(tuple(shape), dtype=dtype, device=device)
    block = allocate_block(num_bytes)
    if block is not None:
        tensor = block.view(dtype).view(tuple(shape))
        return tensor.zero_() if zeros else tensor
    # A worker of torch's: its parent maps the segment, which the system hands out filled with zeros.
    segment = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(segment, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
