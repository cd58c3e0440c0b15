"""What a blueprint will cost to build, learned while batches are built.

Enters: the work of blueprints, and what finished batches took, stage by stage. Leaves: expected seconds and bytes. Each
stage is a sum of non-negative weights times features, fitted by least squares; old batches count less and less. The
first weights are guesses of the right order. Estimates decide when something is built, never what is delivered.
`vlm-stream bench` saves what was learned, and `vlm-stream plan` counts core-seconds with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from vlm_stream.blueprint import Work

    Floats = npt.NDArray[np.float64]

_FEATURES: Final = ("batches", "samples", "kilotokens", "megabytes", "image_megapixels", "video_megapixels")
_SCALES: Final = np.array([1.0, 1.0, 1e3, 1e6, 1e6, 1e6])
_GUESSES: Final = {
    "fetch": np.array([0.005, 0.0, 0.0, 0.01, 0.0, 0.0]),
    "encode": np.array([0.0, 0.002, 0.001, 0.0, 0.02, 0.005]),
    "collate": np.array([0.001, 0.0, 0.0005, 0.0, 0.002, 0.0]),
    "bytes": np.array([0.0, 1e3, 3e4, 0.0, 12e6, 1e6]),
}
_FORGET: Final = 0.995
_PRIOR: Final = 0.05
"""How much a guess weighs against one observation of its feature's usual size."""
_FIT_EVERY: Final = (8, 32)
"""Batches between two fits: at first, and once a fit hardly changes."""
_MANY: Final = 128


class CostModel:
    """Learns what batches take."""

    def __init__(self, weights: Mapping[str, Floats] = _GUESSES) -> None:
        self._weights = self._guesses = np.stack([weights[stage] for stage in _GUESSES])  # [stages, features]
        self._squares = np.zeros((len(_FEATURES), len(_FEATURES)))
        self._products = np.zeros(self._weights.shape)
        self.num_learned = 0
        """Batches that were taken in."""

    @classmethod
    def from_dict(cls, saved: Any) -> CostModel:
        """Return the model that `to_dict` wrote.

        Raises:
            ConfigError: It is something else.
        """
        try:
            weights = {stage: np.array([float(saved[stage][name]) for name in _FEATURES]) for stage in _GUESSES}
            model = cls(weights)
            model.num_learned = int(saved["batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"these are no costs of building ({type(error).__name__}: {error}), so core-seconds cannot be counted "
                f"with them; write them with: vlm-stream bench ... --save-costs FILE"
            ) from None
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return seconds (or bytes) per feature, stage by stage, as JSON values."""
        rows = zip(_GUESSES, self._weights.tolist(), strict=True)
        stages = {stage: dict(zip(_FEATURES, row, strict=True)) for stage, row in rows}
        return {"batches": self.num_learned, **stages}

    def core_seconds(self, work: Work) -> float:
        """Return the expected time in which a core is busy: what is fetched is waited for."""
        _, encode, collate, _ = self._expect(work)
        return encode + collate

    def seconds(self, work: Work) -> float:
        """Return the expected time from the start of fetching to a finished batch."""
        fetch, encode, collate, _ = self._expect(work)
        return fetch + encode + collate

    def num_bytes(self, work: Work) -> int:
        """Return the expected memory of the finished batch, or of its files where that is more."""
        return max(int(self._expect(work)[3]), work.num_bytes)

    def _expect(self, work: Work) -> list[float]:
        """Return what each stage is expected to take."""
        found: list[float] = (self._weights @ _features(work)).tolist()
        return found

    def learn(self, work: Work, seconds: Mapping[str, float], num_bytes: int) -> None:
        """Take in what a finished batch took; stages that are not named took no time."""
        features = _features(work)
        taken = np.array([{**seconds, "bytes": num_bytes}.get(stage, 0.0) for stage in _GUESSES], dtype=np.float64)
        self._squares = _FORGET * self._squares + features[:, None] * features
        self._products = _FORGET * self._products + taken[:, None] * features
        self.num_learned += 1
        if self.num_learned % _FIT_EVERY[self.num_learned > _MANY] == 0:
            self._fit()

    def _fit(self) -> None:
        usual = np.maximum(np.diag(self._squares) / max(self._squares[0, 0], 1.0), 1e-6)  # [features] mean square
        squares = self._squares + np.diag(_PRIOR * usual)
        products = self._products + _PRIOR * usual * self._guesses
        self._weights = np.stack([_solve(squares, row, np.sqrt(usual)) for row in products])


def _solve(squares: Floats, products: Floats, usual: Floats) -> Floats:
    """Solve for a stage's weights; features that come out negative are left out, one after the other."""
    used = np.ones(len(products), dtype=bool)
    weights = np.zeros(len(products))
    while used.any():
        weights = np.zeros(len(products))
        weights[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if (weights >= 0).all():
            break
        used[int(np.argmin(weights * usual))] = False
    return weights


def _features(work: Work) -> Floats:
    values = (1, work.samples, work.tokens, work.num_bytes, work.image_pixels, work.video_pixels)
    return np.asarray(np.array(values, dtype=np.float64) / _SCALES)
