"""Along which axis torch has to cut the tensors that stay in a batch.

Enters: the keyword arguments of a schedule's `step`. Leaves: its `kwargs_chunk_spec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pp_chunk_specs"]


def pp_chunk_specs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunk spec of every argument: rows are axis 0, and axis 1 of positions with several rows per token.

    By default torch cuts axis 0 of everything. Positions `[3 or 4, B, L]` would then be cut between height and width,
    and with a matching number of micro-batches no error would say so.
    """
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:  # a number, such as the labels of the step
            return _Replicate()
        return TensorChunkSpec(1 if name == "position_ids" and value.ndim == 3 else 0)  # type: ignore[no-untyped-call]

    return {name: spec(name, value) for name, value in kwargs.items()}
