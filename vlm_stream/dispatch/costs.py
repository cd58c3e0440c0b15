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
_FIT_EVERY: Final = 8


class CostModel:
    """Learns what batches take."""

    def __init__(self, weights: Mapping[str, Floats] = _GUESSES) -> None:
        self._stages = {name: _Stage(guess) for name, guess in weights.items()}
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
        stages = {
            name: dict(zip(_FEATURES, stage.weights.tolist(), strict=True)) for name, stage in self._stages.items()
        }
        return {"batches": self.num_learned, **stages}

    def core_seconds(self, work: Work) -> float:
        """Return the expected time in which a core is busy: what is fetched is waited for."""
        features = _features(work)
        return sum(self._stages[name].predict(features) for name in ("encode", "collate"))

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
        self.num_learned += 1
        for name, taken in (*seconds.items(), ("bytes", float(num_bytes))):
            if name in self._stages:
                self._stages[name].learn(features, taken)


class _Stage:
    """One weighted sum."""

    def __init__(self, guess: Floats) -> None:
        self.weights = guess
        self._guess = guess
        self._squares = np.zeros((len(guess), len(guess)))
        self._products = np.zeros(len(guess))
        self._num_new = 0

    def predict(self, features: Floats) -> float:
        return float(features @ self.weights)

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
        self.weights = weights


def _features(work: Work) -> Floats:
    values = (1, work.samples, work.tokens, work.num_bytes, work.image_pixels, work.video_pixels)
    return np.asarray(np.array(values, dtype=np.float64) / _SCALES)
