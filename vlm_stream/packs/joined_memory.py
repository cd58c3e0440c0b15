"""The memory that large media are joined in: in a worker process, memory that its parent can map.

What a worker makes goes to its parent in any case; joined in its own memory first, it would be copied once more, and
pixels are the largest thing that a worker touches.
"""

from __future__ import annotations

import multiprocessing
from math import prod
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["allocate"]

_LARGE_BYTES: Final = 1 << 20  # below, a copy costs less than a segment


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zeros: bool) -> torch.Tensor:
    """Return a tensor of zeros, or, where they are not needed, of anything."""
    num_bytes = prod(shape) * dtype.itemsize
    # A daemonic process is a worker: torch's, or ours. Ranks that a launcher starts are not.
    if num_bytes >= _LARGE_BYTES and device.type == "cpu" and multiprocessing.current_process().daemon:
        # The system hands a segment out filled with zeros.
        segment = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=dtype).set_(segment, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
    return (torch.zeros if zeros else torch.empty)(tuple(shape), dtype=dtype, device=device)
