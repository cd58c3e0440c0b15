"""The unit stream, window by window.

Enters: the start of a window, and the mixture's terms. Leaves: that window's units and the start of the next. A window
is a pure function of the two: any process can plan any window whose start it has. No world size here.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError
from vlm_stream.plan.balance import llm_cost
from vlm_stream.plan.mixture import draw
from vlm_stream.plan.order import Samples, SourceStream, concatenate
from vlm_stream.plan.randomness import Key, mix64
from vlm_stream.plan.units import cut_units
from vlm_stream.plan.values import Dropped, Ints, PackConfig, PlanConfig

_UNKNOWN: Final = -(1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowStart:
    """What a window is planned from."""

    number: int  # windows before this one
    draw: int  # draws before it
    positions: tuple[int, ...]  # samples drawn from each source before it, over all epochs
    carry: Samples  # samples that earlier windows gave back


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The part of the config that may change at a resume; a window keeps the terms under which it was drawn."""

    first_window: int = 0  # the first window that is drawn under these terms
    names: tuple[str, ...]  # sources, in the order in which the draw knows them
    shares: tuple[float, ...]
    stop: str
    epochs: int | None


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached_property needs a dict
class Window:
    """One planned window."""

    start: WindowStart
    after: WindowStart
    samples: Samples  # [n] Unit after unit
    splits: Ints  # [u + 1]
    tokens: Ints  # [u]
    llm: Ints  # [u] Cost in the language model
    vit: Ints  # [u] Cost in the vision tower
    decode: Ints  # [u] Cost of decoding videos; 0 where it is not known
    labels: Ints  # [u] Tokens that are learned; below 0: unknown for one of the samples at least
    hashes: npt.NDArray[np.uint64]  # [u] Of the refs in each unit
    dropped: tuple[Dropped, ...]
    is_last: bool  # the stream ends with it: the step that takes its last unit is filled up

    @cached_property
    def digest(self) -> str:
        """Return the digest of all units: what a resume has to find again."""
        return hashlib.blake2b(self.hashes.astype("<u8").tobytes(), digest_size=8).hexdigest()

    @property
    def num_units(self) -> int:
        return len(self.tokens)


def epoch_at(positions: Sequence[int], streams: Sequence[SourceStream], terms: Terms) -> int:
    """Return the epoch of a mixture: that of its foremost source, or of its last one where all have to finish."""
    share = dict(zip(terms.names, terms.shares, strict=True))
    epochs = [
        position // stream.epoch_length
        for position, stream in zip(positions, streams, strict=True)
        if share.get(stream.spec.name, 0.0) > 0
    ]
    return min(epochs) if terms.stop in ("all", "each") else max(epochs)


def plan_window(start: WindowStart, streams: Sequence[SourceStream], config: PlanConfig, terms: Terms) -> Window | None:
    """Plan one window; None when the stream has ended."""
    fresh, draws_after, ended = _draw_fresh(start, streams, config, terms)
    if not len(fresh) and not len(start.carry):
        return None
    samples = concatenate([part for part in (start.carry, fresh) if len(part)])
    key = Key(seed=config.seed, purpose="units", index=start.number) if config.shuffle else None
    cut = cut_units(samples, config.mode, key, last=ended)
    if cut.dropped and config.mode.long_samples == "raise":
        raise ConfigError(_refusal(cut.dropped[0], streams, config))
    drawn = np.bincount(fresh.refs[:, 0], minlength=len(streams)).tolist()
    after = WindowStart(
        number=start.number + 1,
        draw=draws_after,
        positions=tuple(p + n for p, n in zip(start.positions, drawn, strict=True)),
        carry=cut.carry,
    )
    members, splits = cut.samples, cut.splits
    return Window(
        start=start,
        after=after,
        samples=members,
        splits=splits,
        tokens=_sums(members.tokens, splits),
        llm=_sums(llm_cost(members.tokens, config.balance.costs), splits),
        vit=_sums(members.vit, splits),
        decode=_sums(members.decode, splits),
        # So far below 0 that no number of labels makes up for it.
        labels=_sums(np.where(members.labels < 0, _UNKNOWN, members.labels), splits),
        hashes=_hash_units(members.refs, splits, [stream.spec.name for stream in streams]),
        dropped=cut.dropped,
        is_last=ended,
    )


def _refusal(note: Dropped, streams: Sequence[SourceStream], config: PlanConfig) -> str:
    mode = config.mode
    limit = f"pack_size={mode.pack_size}" if isinstance(mode, PackConfig) else f"max_tokens={mode.max_tokens}"
    if note.reason == "too_much_vision" and isinstance(mode, PackConfig):
        limit = f"vision_size={mode.vision_size}"
    return (
        f"Sample {note.ref.row} of shard {note.ref.shard} of source '{streams[note.ref.source].spec.name}' has "
        f"{note.tokens} tokens ({note.vision_tokens} of vision), above {limit}; it fits no unit, and long_samples is "
        f"'raise'. Raise the limit, or set long_samples to 'drop' or 'truncate'."
    )


def _draw_fresh(
    start: WindowStart, streams: Sequence[SourceStream], config: PlanConfig, terms: Terms
) -> tuple[Samples, int, bool]:
    """Draw a window's new samples; return them with the number of the next draw and whether the stop rule was met."""
    number_of = {stream.spec.name: number for number, stream in enumerate(streams)}
    numbers = np.asarray([number_of[name] for name in terms.names], dtype=np.int64)
    left = [
        None if terms.epochs is None else terms.epochs * streams[n].epoch_length - start.positions[n]
        for n in numbers.tolist()
    ]
    draws = draw(start.draw, config.window, terms.shares, left, terms.stop)
    sources = numbers[draws.sources]
    counts = np.bincount(sources, minlength=len(streams)).tolist()
    taken = [
        stream.take(np.arange(position, position + count))
        for stream, position, count in zip(streams, start.positions, counts, strict=True)
        if count
    ]
    fresh = concatenate(taken)
    if len(taken) > 1:  # source by source -> the order of the draws
        fresh = fresh.pick(np.argsort(np.argsort(sources, kind="stable"), kind="stable"))
    return fresh, draws.next_draw, draws.ended


def _sums(values: Ints, splits: Ints) -> Ints:
    """Add up the values of each unit."""
    totals = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(totals[splits[1:]] - totals[splits[:-1]])


def _hash_units(refs: Ints, splits: Ints, names: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return [u] a hash of the refs of each unit, in their order, that does not depend on how sources are numbered."""
    salts = np.asarray(
        [int.from_bytes(Key(seed=0, purpose="hash", source=name).digest()[:8], "little") for name in names],
        dtype=np.uint64,
    )
    word = (refs[:, 1].astype(np.uint64) << np.uint64(32)) ^ refs[:, 2].astype(np.uint64)
    word = mix64(word ^ salts[refs[:, 0]])
    place = np.arange(len(refs)) - np.repeat(splits[:-1], np.diff(splits))
    totals = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mix64(word ^ place.astype(np.uint64)))])
    return np.asarray(totals[splits[1:]] - totals[splits[:-1]])
