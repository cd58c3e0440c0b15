"""Where all randomness of a plan comes from.

Enters: (seed, epoch, source, purpose, index). Leaves: 64-bit words, or a permutation made of them. Only the raw
output of a Philox counter is used: numpy promises never to change it, while its own shuffles may change between
versions, and a state must survive an upgrade.

This covers `vlm_stream.plan`, where nothing else draws, and the rooms that import it (map-style samplers, the order of
records at conversion). It does not cover choices outside the plan: shares of raw sources, mock data, substitutes for
bad samples in collation, and the jitter of retries draw by themselves.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.random import Philox


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What one random decision is for; different keys give independent randomness."""

    seed: int
    purpose: str
    source: str = ""
    """Name of the source: names, not list positions, so that adding a source leaves the others' order alone."""
    epoch: int = 0
    index: int = 0

    def digest(self) -> bytes:
        """Return 16 bytes that depend on every part."""
        text = f"{self.seed}\x1f{self.epoch}\x1f{self.source}\x1f{self.purpose}\x1f{self.index}"
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"vlm_stream.plan").digest()


def words(key: Key, count: int) -> npt.NDArray[np.uint64]:
    philox = Philox(key=np.frombuffer(key.digest(), dtype="<u8").astype(np.uint64))
    return np.asarray(philox.random_raw(count), dtype=np.uint64)


def permutation(key: Key, count: int) -> npt.NDArray[np.int64]:
    """Return a random permutation of `range(count)`.

    Each number rides in the low bits of a random word and the words are sorted: no two are equal, so every sorting
    algorithm on every machine gives the same result.
    """
    if count < 2:
        return np.zeros(count, dtype=np.int64)
    bits = np.uint64(int(count - 1).bit_length())
    tagged = words(key, count)
    tagged <<= bits
    tagged |= np.arange(count, dtype=np.uint64)
    tagged.sort()
    tagged &= (np.uint64(1) << bits) - np.uint64(1)
    return tagged.view(np.int64)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words, one by one and reversibly (the finaliser of splitmix64)."""
    out = values + np.uint64(0x9E3779B97F4A7C15)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))
