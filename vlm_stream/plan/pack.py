"""Samples of one window -> packs: best-fit decreasing on residual capacity.

Enters: lengths, vision tokens, capacity. Leaves: the pack number of every sample. Longest first, each sample goes to
the open pack that it fills best; when none has room, a new one opens. It knows nothing of orders, windows or ranks.

Open packs lie in stacks by their residual. A two-level bit set of the stacks in use (64 residuals to a word, one bit
for every word) finds the smallest sufficient residual in a few integer operations, for any capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["PackConfig", "argsort_small", "best_fit_decreasing", "check_long"]

_MAX_TRIES = 64  # packs looked at for one sample when a vision cap is set
_LONG = ("drop", "raise", "truncate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """How samples are packed into rows."""

    pack_size: int
    """Tokens in a row."""
    packing_ratio: float = 1.0
    """Share of the row that is planned full; below 1 leaves room for lengths that were estimated too low."""
    vision_size: int | None = None
    """Vision tokens that a row may hold at most."""
    long_samples: str = "drop"
    """What happens to samples above `pack_size`: `drop`, `truncate` or `raise`. Those above `vision_size` cannot be
    truncated and are dropped then."""
    alignment: int = 1
    """Each sample is padded to a multiple of this (context parallelism wants 2 x its size)."""
    max_packs: int | None = None
    """The stream ends after so many packs."""
    carry_samples: int = 512
    """Most samples that under-filled packs give back to the next window."""
    carry_windows: int = 4
    """Windows through which one sample may be carried."""

    def __post_init__(self) -> None:
        """Refuse rows that can hold nothing."""
        if self.pack_size < 1 or self.alignment < 1 or self.pack_size % self.alignment:
            raise ConfigError(
                f"pack_size={self.pack_size} with alignment={self.alignment} gives rows that cannot be cut evenly. "
                f"Give a pack_size that is a positive multiple of the alignment."
            )
        if not 0 < self.packing_ratio <= 1 or self.capacity < 1:
            raise ConfigError(
                f"packing_ratio={self.packing_ratio} leaves a capacity of {self.capacity} tokens in a row of "
                f"{self.pack_size}; nothing fits. Give a ratio above 0, at most 1."
            )
        check_long(self.long_samples)
        for name, least in (("vision_size", 1), ("max_packs", 1), ("carry_samples", 0), ("carry_windows", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"mode.{name} is {value}, below its least value {least}; raise it or leave it out.")

    @property
    def capacity(self) -> int:
        """Return the tokens that a pack of several samples may hold."""
        return int(self.pack_size * self.packing_ratio) // self.alignment * self.alignment


def check_long(rule: str) -> None:
    """Refuse an unknown rule for long samples."""
    if rule not in _LONG:
        raise ConfigError(f"long_samples={rule!r} means nothing. Allowed: {', '.join(_LONG)}.")


def best_fit_decreasing(lengths: Ints, capacity: int, vision: Ints | None = None, vision_size: int = 0) -> Ints:
    """Return [n] the pack number of every sample; no length may exceed the capacity, no vision count its size.

    >>> best_fit_decreasing(np.array([3, 8, 2, 5]), 8).tolist()
    [1, 0, 2, 1]
    """
    order = argsort_small(capacity - lengths, capacity)
    packs = np.empty(len(lengths), dtype=np.int64)
    if vision is None:
        packs[order] = _pack_sorted(lengths[order].tolist(), capacity)
    else:
        packs[order] = _pack_sorted_capped(lengths[order].tolist(), capacity, vision[order].tolist(), vision_size)
    return packs


def argsort_small(values: Ints, most: int) -> Ints:
    """Sort whole numbers from 0 to `most`, stably; numpy sorts 16-bit numbers by radix, ten times as fast."""
    return np.argsort(values.astype(np.uint16 if most < 1 << 16 else np.int64), kind="stable")


def _pack_sorted(lengths: list[int], capacity: int) -> list[int]:
    stacks: dict[int, list[int]] = {}  # packs by residual
    low = [0] * ((capacity >> 6) + 1)  # bit r & 63 of word r >> 6: stack r is in use
    high = 0  # bit w: word w is not zero
    bit = [1 << k for k in range(64)]
    out: list[int] = []
    put = out.append
    num_packs = 0
    for length in lengths:
        word = length >> 6
        found = low[word] >> (length & 63)
        if found:
            residual = length + (found & -found).bit_length() - 1
        else:
            above = high >> (word + 1)
            if above:
                word += (above & -above).bit_length()
                found = low[word]
                residual = (word << 6) + (found & -found).bit_length() - 1
            else:
                residual = -1
        if residual < 0:
            pack = num_packs
            num_packs += 1
            rest = capacity - length
        else:
            stack = stacks[residual]
            pack = stack.pop()
            if not stack:
                word = residual >> 6
                low[word] ^= bit[residual & 63]
                if not low[word]:
                    high ^= 1 << word
            rest = residual - length
        put(pack)
        word = rest >> 6
        flags = low[word]
        if flags & bit[rest & 63]:
            stacks[rest].append(pack)
        else:
            stacks[rest] = [pack]
            if not flags:
                high |= 1 << word
            low[word] = flags | bit[rest & 63]
    return out


def _pack_sorted_capped(lengths: list[int], capacity: int, vision: list[int], vision_size: int) -> list[int]:
    """Like `_pack_sorted`, with a second cap: packs are tried from the tightest fit upwards, a bounded number."""
    stacks: dict[int, list[int]] = {}
    used: list[int] = []  # residuals in use, ascending
    room: list[int] = []  # vision tokens that each pack can still take
    out: list[int] = []
    for length, seen in zip(lengths, vision, strict=True):
        pack, rest = _find_capped(length, seen, stacks, used, room)
        if pack < 0:
            pack, rest = len(room), capacity - length
            room.append(vision_size)
        room[pack] -= seen
        if rest not in stacks:
            stacks[rest] = []
            insort(used, rest)
        stacks[rest].append(pack)
        out.append(pack)
    return out


def _find_capped(
    length: int, seen: int, stacks: dict[int, list[int]], used: list[int], room: list[int]
) -> tuple[int, int]:
    """Take the tightest pack with room for both out of its stack; return it and its new residual, or (-1, 0)."""
    tries = _MAX_TRIES
    for at in range(bisect_left(used, length), len(used)):
        stack = stacks[used[at]]
        for place in range(len(stack) - 1, -1, -1):
            if room[stack[place]] >= seen:
                residual = used[at]
                pack = stack.pop(place)
                if not stack:
                    del stacks[residual]
                    del used[at]
                return pack, residual - length
            tries -= 1
            if not tries:
                return -1, 0
    return -1, 0
