"""What a sample costs the model: one number for the language model, one for the vision tower.

Enters: lengths and patch counts, and four coefficients. Leaves: whole numbers, so that sums are the same in any order
on any machine and all ranks agree on a plan without talking. A model's config is read as plain values, never
imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["CostConfig", "llm_cost", "vit_cost"]

_UNITS_PER_TOKEN = 1024.0  # resolution of the whole numbers: one text token costs this much


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """`llm = a1 * tokens + a2 * tokens^2` for each document, `vit = b1 * patches + b2 * patches^2` for each image.

    Only ratios matter. The defaults are those of a 7B model with a 0.7B vision tower, both trained.
    """

    llm_linear: float = 1.0
    llm_square: float = 1.4e-5
    vit_linear: float = 0.09
    vit_square: float = 1.5e-6

    def __post_init__(self) -> None:
        """Refuse costs that are negative or nothing at all."""
        values = (self.llm_linear, self.llm_square, self.vit_linear, self.vit_square)
        if any(not np.isfinite(v) or v < 0 for v in values) or not any(values):
            raise ConfigError(
                f"Cost coefficients {values} cannot be balanced: they must be finite, at least 0, and not all 0. "
                f"Leave them out for the defaults or derive them with costs_of_model()."
            )

    @property
    def scale(self) -> float:
        """Return what turns a cost into whole units."""
        lead = next(v for v in (self.llm_linear, self.vit_linear, self.llm_square, self.vit_square) if v > 0)
        return _UNITS_PER_TOKEN / lead


def llm_cost(tokens: npt.NDArray[np.int64], costs: CostConfig) -> npt.NDArray[np.int64]:
    """Return [n] the language model's cost of documents of that length."""
    length = tokens.astype(np.float64)
    return np.rint((length * costs.llm_linear + length * length * costs.llm_square) * costs.scale).astype(np.int64)


def vit_cost(
    patches: npt.NDArray[np.int64], squares: npt.NDArray[np.float64], costs: CostConfig
) -> npt.NDArray[np.int64]:
    """Return [n] the vision tower's cost of samples with that many patches."""
    linear = patches.astype(np.float64) * costs.vit_linear
    return np.rint((linear + squares * costs.vit_square) * costs.scale).astype(np.int64)
