"""`Batch`: the dict of tensors that a trainer gets, which nobody can cut in silence.

Rows of `input_ids` are not rows of `pixel_values`, of grids or of positions. Code that cuts every tensor of a batch to
the same number of rows (accelerate's dispatcher does) would leave tokens without their pixels. Such code rebuilds the
batch as `type(batch)(...)`, and that is where it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vlm_stream.errors import ConfigError


class Batch(dict[str, Any]):
    """A ready batch: `model(**batch)`. Any dict operation works; what comes out of `|` or `dict()` is a plain dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a dict takes.

        Raises:
            ConfigError: A tensor is a cut of the rows of a longer one.
        """
        super().__init__(*args, **kwargs)
        for name, value in self.items():
            base = value._base if isinstance(value, torch.Tensor) else None
            if base is not None and _is_cut(value, base):
                raise ConfigError(
                    f"batch['{name}'] was cut from {len(base)} to {len(value)} rows by code that cuts all "
                    f"tensors of a batch alike; pixels and grids have other rows than tokens, so media would be lost. "
                    f"A batch is one rank's share already: give the trainer a StreamLoader (accelerator.prepare leaves "
                    f"it as it is), or see vlm_stream.integrations"
                )

    @classmethod
    def sealed(cls, values: Mapping[str, Any]) -> Batch:
        """Return a new batch whose tensors are no views, so that a view in it can only be somebody's cut."""
        batch = cls()
        batch.update({name: _without_base(value) for name, value in values.items()})
        return batch


def _is_cut(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    same = 0 < tensor.ndim == base.ndim and tensor.shape[1:] == base.shape[1:]
    return same and tensor.shape[0] < base.shape[0]


def _without_base(value: Any) -> Any:
    """Return the same memory as a tensor of its own; torch remembers of which tensor another is a view."""
    if not isinstance(value, torch.Tensor) or value._base is None or value.requires_grad:
        return value
    own = torch.empty(0, dtype=value.dtype, device=value.device)
    return own.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
