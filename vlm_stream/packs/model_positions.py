"""Multi-axis positions through a model's own `get_rope_index`, whichever of its signatures is installed.

Enters: an encoded sample, the bound method. Leaves: `[3, length]`, or None where the callback is not of that kind.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.packs.keys import token_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.packs.keys import Sample

__all__ = ["ModelPositions", "compute_mrope_position_ids"]


@dataclass(frozen=True, slots=True)
class ModelPositions:
    """A position rule that asks a model; call it with an encoded sample."""

    get_rope_index: Callable[..., Any]

    def __call__(self, sample: Sample) -> torch.Tensor | None:
        """Return the positions `[3, length]`, or None where the callback takes no `input_ids`."""
        return compute_mrope_position_ids(sample, self.get_rope_index)


def compute_mrope_position_ids(sample: Sample, get_rope_index: Callable[..., Any]) -> torch.Tensor | None:
    """Ask a model's `get_rope_index` for the positions of one sample.

    Only arguments that the signature names are passed (a bare `**kwargs` names none), because transformers 4 and 5 name
    different ones. `mm_token_type_ids` are rebuilt from the model's config where a sample has none.

    Args:
        sample: An encoded, unshifted sample.
        get_rope_index: The method, bound to its model.

    Returns:
        `[3, length]`, or None when the callback has no readable signature or takes no `input_ids`.
    """
    try:
        names = set(inspect.signature(get_rope_index).parameters)
    except (TypeError, ValueError):
        return None
    ids = token_row(sample, "input_ids")
    if "input_ids" not in names or ids is None:
        return None
    offered: dict[str, Any] = {"input_ids": ids[None]}
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        offered[name] = sample.get(name)
    if isinstance(offered["second_per_grid_ts"], list):
        offered["second_per_grid_ts"] = torch.tensor(offered["second_per_grid_ts"])
    # Qwen-Omni's name for the same numbers.
    offered["second_per_grids"] = offered["second_per_grid_ts"]
    mask = token_row(sample, "attention_mask")
    offered["attention_mask"] = None if mask is None else mask[None]
    if "mm_token_type_ids" in names:
        types = token_row(sample, "mm_token_type_ids")
        offered["mm_token_type_ids"] = (_types_from_config(ids, get_rope_index) if types is None else types)[None]
    result = get_rope_index(**{name: value for name, value in offered.items() if name in names})
    positions: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return positions[:, 0] if positions.ndim == 3 else positions


def _types_from_config(ids: torch.Tensor, get_rope_index: Callable[..., Any]) -> torch.Tensor:
    """Mark image tokens with 1 and video tokens with 2, by the ids in the config of the model that is asked."""
    config = getattr(getattr(get_rope_index, "__self__", None), "config", None)
    types = torch.zeros_like(ids)
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        token_id = getattr(config, name, None)
        if token_id is not None:
            types[ids == token_id] = kind
    return types
