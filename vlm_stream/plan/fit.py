"""Samples that are too long for a unit: dropped or truncated, and always named.

Enters: samples and limits. Leaves: the samples that stay, with the lengths that will be delivered, and the list of
those that were dropped or shortened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan.values import Dropped, Ref

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.plan.samples import Samples

__all__ = ["fit_samples"]


def fit_samples(
    samples: Samples, *, max_tokens: int | None, max_vision: int | None, rule: str
) -> tuple[Samples, tuple[Dropped, ...]]:
    """Apply the rule to samples above a limit and keep the order of the others; `raise` is left to the caller."""
    if max_tokens is None and max_vision is None:
        return samples, ()
    long = samples.tokens > max_tokens if max_tokens is not None else np.zeros(len(samples), dtype=bool)
    wide = samples.vision > max_vision if max_vision is not None else np.zeros(len(samples), dtype=bool)
    if not long.any() and not wide.any():
        return samples, ()
    notes: list[Dropped] = []
    gone = wide if rule == "truncate" else long | wide
    notes += _notes(samples, gone & wide, "too_much_vision")
    notes += _notes(samples, gone & ~wide, "too_long")
    if rule == "truncate":
        # A carried sample was named when it first came.
        notes += _notes(samples, long & ~wide & (samples.age == 0), "truncated")
        if long.any():  # how many labels are cut off is not known here
            tokens, labels = np.minimum(samples.tokens, max_tokens or 0), np.where(long, -1, samples.labels)
            samples = replace(samples, tokens=tokens, labels=labels)
    return samples.pick(~gone), tuple(notes)


def _notes(samples: Samples, which: npt.NDArray[np.bool_], reason: str) -> list[Dropped]:
    rows = np.flatnonzero(which)
    return [
        Dropped(ref=Ref(*ref), reason=reason, tokens=tokens, vision_tokens=vision)
        for ref, tokens, vision in zip(
            samples.refs[rows].tolist(), samples.tokens[rows].tolist(), samples.vision[rows].tolist(), strict=True
        )
    ]
