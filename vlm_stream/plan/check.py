"""Whether a state belongs to this plan: what differs, and what can be done about it.

Enters: what a state says and what the plan is. Leaves: the cursor to start from, or a `StateError` that names the
difference. Weights, stop rule, epochs, world size, batch size and worker count may change freely; other changes need
to be allowed by name, and then the window that was open is planned anew from its start, so that nothing is missed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.errors import ConfigError, StateError, nearest_name
from vlm_stream.plan.samples import read_refs
from vlm_stream.plan.state import Era, Restored
from vlm_stream.plan.window import Cursor, Terms

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.config import PlanConfig
    from vlm_stream.plan.samples import Samples, SourceStream
    from vlm_stream.plan.steps import Partial, Progress
    from vlm_stream.plan.values import ColumnReader

__all__ = ["OVERRIDES", "Start", "start_from"]

logger = logging.getLogger(__name__)

OVERRIDES = ("geometry", "plan", "sources", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Where and how a stream goes on."""

    cursor: Cursor
    done: npt.NDArray[np.bool_]
    partial: Partial | None
    progress: Progress
    eras: tuple[Era, ...]
    window_digest: str | None
    reported: int
    """Number of the first window whose dropped samples were not told yet."""


def start_from(
    saved: Restored,
    streams: Sequence[SourceStream],
    read: ColumnReader,
    config: PlanConfig,
    terms: Terms,
    allow: Collection[str],
) -> Start:
    """Check a state against the plan and return where to go on."""
    for name in allow:
        if name not in OVERRIDES:
            raise ConfigError(f"allow={name!r} is no override: {nearest_name(name, OVERRIDES)}")
    anew = [
        _check_plan(saved, config, allow),
        _check_geometry(saved, config, allow),
        _check_sources(saved, streams, allow),
    ]
    _check_text(saved, config, allow)
    cursor = Cursor(
        window=saved.window,
        draw=saved.draw,
        units=saved.units,
        positions=tuple(_position(saved, stream) for stream in streams),
        carry=_carry(saved, streams, read, config),
    )
    if any(anew):
        if len(saved.done):
            logger.warning(
                "Window %d is planned anew from its start: up to %d of its units come again.",
                saved.window,
                int(saved.done.sum()),
            )
        return Start(
            cursor=cursor,
            done=np.zeros(0, dtype=bool),
            partial=None,
            progress=saved.progress,
            eras=(Era(first_window=saved.window, terms=terms),),
            window_digest=None,
            reported=saved.window,
        )
    eras = saved.eras
    if not eras or eras[-1].terms != terms:
        # What was planned stays as it was; the new terms begin behind it.
        eras = (
            *[era for era in eras if era.first_window < saved.planned],
            Era(first_window=saved.planned, terms=terms),
        )
    return Start(
        cursor=cursor,
        done=saved.done,
        partial=saved.partial,
        progress=saved.progress,
        eras=eras,
        window_digest=saved.window_digest,
        reported=saved.planned,
    )


def _check_plan(saved: Restored, config: PlanConfig, allow: Collection[str]) -> bool:
    now = config.stream_fields()
    differs = [
        f"{name} was {saved.stream_fields.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*now, *saved.stream_fields})
        if saved.stream_fields.get(name) != now.get(name)
    ]
    if not differs:
        return False
    if saved.stream_fields.get("seed") != now["seed"]:
        raise StateError(
            f"The state belongs to another order: seed was {saved.stream_fields.get('seed')!r} and is {now['seed']!r}, "
            f"so its positions name other samples. Use the old seed, or start without a state."
        )
    if "plan" not in allow:
        raise StateError(
            f"The state belongs to another plan: {'; '.join(differs)}. Its open window would be cut differently. "
            f"Restore the old values, or allow 'plan': positions stay and the open window is planned anew."
        )
    return True


def _check_geometry(saved: Restored, config: PlanConfig, allow: Collection[str]) -> bool:
    if saved.geometry == config.geometry:
        return False
    if "geometry" not in allow:
        raise StateError(
            f"The state was written with another processor geometry ({saved.geometry!r}, now {config.geometry!r}), so "
            f"lengths differ and units would be cut differently. Use the old processor, or allow 'geometry': positions "
            f"stay and the open window is planned anew."
        )
    return True


def _check_text(saved: Restored, config: PlanConfig, allow: Collection[str]) -> None:
    """Refuse other ids for the same text; the plan itself counts by the index and does not change."""
    if "tokenizer" not in allow and saved.text and config.text and saved.text != config.text:
        raise StateError(
            f"The state was written with another tokenizer or chat template ({saved.text:.12}, now {config.text:.12}), "
            f"so the rest of the run would see other ids for the same text. Use the old processor, or allow "
            f"'tokenizer': the samples and their order stay as they are."
        )


def _check_sources(saved: Restored, streams: Sequence[SourceStream], allow: Collection[str]) -> bool:
    """Return whether the open window cannot be planned again as it was."""
    now = {stream.spec.name: stream for stream in streams}
    gone = sorted(set(saved.positions) - set(now))
    new = sorted(set(now) - set(saved.positions))
    changed = sorted(n for n in set(now) & set(saved.positions) if saved.digests[n] != now[n].digest)
    facts = [f"source '{name}' is gone" for name in gone]
    facts += [f"source '{name}' is new" for name in new]
    facts += [f"source '{name}' has other shards, indexes or another sample_ratio" for name in changed]
    if facts and "sources" not in allow:
        raise StateError(
            f"The state belongs to another mixture: {'; '.join(facts)}. Restore it, or allow 'sources': all other "
            f"sources keep their positions. (A source with weight 0 leaves without an override.)"
        )
    return bool(gone or changed)


def _position(saved: Restored, stream: SourceStream) -> int:
    """Return where a source goes on; one whose epoch has another length now goes on at the same share of it."""
    position = saved.positions.get(stream.spec.name, 0)
    length = saved.lengths.get(stream.spec.name, stream.epoch_length)
    if length == stream.epoch_length:
        return position
    epoch, offset = divmod(position, length)
    return epoch * stream.epoch_length + offset * stream.epoch_length // length


def _carry(saved: Restored, streams: Sequence[SourceStream], read: ColumnReader, config: PlanConfig) -> Samples:
    """Look the carried samples up again, by the names of their sources."""
    number_of = {stream.spec.name: number for number, stream in enumerate(streams)}
    numbers = np.asarray([number_of.get(name, -1) for name in saved.positions], dtype=np.int64)
    refs = saved.carry_refs.copy()
    refs[:, 0] = numbers[refs[:, 0]]
    sizes = [np.asarray(stream.spec.samples_per_shard, dtype=np.int64) for stream in streams]
    found = np.asarray(
        [s >= 0 and shard < len(sizes[s]) and row < int(sizes[s][shard]) for s, shard, row in refs.tolist()], dtype=bool
    )
    if not found.all():
        logger.warning("%d carried samples are gone with their source or shard.", int((~found).sum()))
    carry = read_refs(refs[found], [stream.spec for stream in streams], read, config.balance.costs)
    return replace(carry, age=saved.carry_age[found])
