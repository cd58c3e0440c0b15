"""What a blueprint will cost to build, learned while batches are built.

Enters: the work of blueprints, and what finished batches took, stage by stage. Leaves: expected seconds and bytes. Each
stage is a sum of non-negative weights times features, fitted by least squares; old batches count less and less. The
first weights are guesses of the right order. Estimates decide when something is built, never what is delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from vlm_stream.blueprint import Work

    Floats = npt.NDArray[np.float64]

__all__ = ["CostModel"]

_SCALES: Final = np.array([1.0, 1.0, 1e3, 1e6, 1e6, 1e6])
"""Features: one batch, samples, thousands of tokens, megabytes, megapixels of images, megapixels of frames."""
_GUESSES: Final = {
    "fetch": np.array([0.005, 0.0, 0.0, 0.01, 0.0, 0.0]),
    "encode": np.array([0.0, 0.002, 0.001, 0.0, 0.02, 0.005]),
    "collate": np.array([0.001, 0.0, 0.0005, 0.0, 0.002, 0.0]),
    "bytes": np.array([0.0, 1e3, 3e4, 0.0, 12e6, 1e6]),
}
_FORGET: Final = 0.995
_PRIOR: Final = 0.05
"""How much a guess weighs against one observation of its feature's usual size."""
_FIT_EVERY: Final = 8


class CostModel:
    """Learns what batches take."""

    def __init__(self) -> None:
        """Start with the guesses."""
        self._stages = {name: _Stage(guess) for name, guess in _GUESSES.items()}

    def seconds(self, work: Work) -> float:
        """Return the expected time from the start of fetching to a finished batch."""
        features = _features(work)
        return sum(self._stages[name].predict(features) for name in ("fetch", "encode", "collate"))

    def num_bytes(self, work: Work) -> int:
        """Return the expected memory of the finished batch, or of its files where that is more."""
        return max(int(self._stages["bytes"].predict(_features(work))), work.num_bytes)

    def learn(self, work: Work, seconds: Mapping[str, float], num_bytes: int) -> None:
        """Take in what a finished batch took."""
        features = _features(work)
        for name, taken in (*seconds.items(), ("bytes", float(num_bytes))):
            if name in self._stages:
                self._stages[name].learn(features, taken)


class _Stage:
    """One weighted sum."""

    def __init__(self, guess: Floats) -> None:
        self._weights = guess
        self._guess = guess
        self._squares = np.zeros((len(guess), len(guess)))
        self._products = np.zeros(len(guess))
        self._num_new = 0

    def predict(self, features: Floats) -> float:
        return float(features @ self._weights)

    def learn(self, features: Floats, taken: float) -> None:
        self._squares = _FORGET * self._squares + np.outer(features, features)
        self._products = _FORGET * self._products + features * taken
        self._num_new += 1
        if self._num_new >= _FIT_EVERY:
            self._num_new = 0
            self._fit()

    def _fit(self) -> None:
        """Solve for the weights; features that come out negative are left out, one after the other."""
        usual = np.maximum(np.diag(self._squares) / max(self._squares[0, 0], 1.0), 1e-6)  # [features] mean square
        squares = self._squares + np.diag(_PRIOR * usual)
        products = self._products + _PRIOR * usual * self._guess
        used = np.ones(len(products), dtype=bool)
        weights = np.zeros(len(products))
        while used.any():
            weights = np.zeros(len(products))
            weights[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
            if (weights >= 0).all():
                break
            used[int(np.argmin(weights * np.sqrt(usual)))] = False
        self._weights = weights


def _features(work: Work) -> Floats:
    values = (1, work.samples, work.tokens, work.num_bytes, work.image_pixels, work.video_pixels)
    return np.asarray(np.array(values, dtype=np.float64) / _SCALES)
