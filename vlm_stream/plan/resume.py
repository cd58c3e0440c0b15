"""Whether a state belongs to this plan: what differs, and what can be done about it.

Enters: what a state says and what the plan is. Leaves: the cursor to start from, or a `StateError` that names the
difference. Weights, stop rule, epochs, world size, batch size and worker count may change freely; other changes need
to be allowed by name, and then the window that was open is planned again from its start, so that nothing is missed.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from vlm_stream.errors import ConfigError, StateError, nearest_name
from vlm_stream.plan.order import Samples, SourceStream, concatenate
from vlm_stream.plan.queue import Cursor
from vlm_stream.plan.state import USUAL, Fingerprints, State
from vlm_stream.plan.units import sort_carried
from vlm_stream.plan.window import Terms, WindowStart

logger = logging.getLogger(__name__)

OVERRIDES = ("geometry", "plan", "sources", "tokenizer")


def resume(
    state: State, now: Fingerprints, streams: Sequence[SourceStream], terms: Terms, allow: Collection[str]
) -> Cursor:
    """Check a state against the plan and return the cursor to go on from."""
    for name in allow:
        if name not in OVERRIDES:
            raise ConfigError(f"allow={name!r} is no override: {nearest_name(name, OVERRIDES)}")
    was = state.fingerprints
    differs = [_check_plan(was, now, allow), _check_geometry(was, now, allow), _check_sources(was, now, allow)]
    _check_text(was, now, allow)
    positions = tuple(_position(state, stream) for stream in streams)
    cursor = Cursor(
        window=WindowStart(
            number=state.window, draw=state.draw, positions=positions, carry=_carry(state, positions, streams)
        ),
        done=state.done,
        window_digest=state.window_digest,
        planned=state.planned,
        terms=state.terms,
        delivered=state.delivered,
        begun=state.begun,
    )
    if any(differs):
        if len(state.done):
            logger.warning(
                "Window %d is planned again from its start: up to %d of its units come again.",
                state.window,
                int(state.done.sum()),
            )
        return replace(
            cursor,
            done=np.zeros(0, dtype=bool),
            window_digest=None,
            planned=state.window,
            terms=(replace(terms, first_window=state.window),),
            begun=None,
        )
    if state.terms[-1] == replace(terms, first_window=state.terms[-1].first_window):
        return cursor
    # What was planned stays as it was; the new terms begin after it.
    before = [each for each in state.terms if each.first_window < state.planned]
    return replace(cursor, terms=(*before, replace(terms, first_window=state.planned)))


def _check_plan(was: Fingerprints, now: Fingerprints, allow: Collection[str]) -> bool:
    pairs = {
        name: tuple(each.plan.get(name, USUAL.get(name)) for each in (was, now))
        for name in sorted({*now.plan, *was.plan})
    }
    differs = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
    if not differs:
        return False
    old, new = pairs.get("seed", (0, 0))
    if old != new:
        raise StateError(
            f"The state belongs to another order: seed was {old!r} and is {new!r}, "
            f"so its positions name other samples. Use the old seed, or start without a state."
        )
    if "plan" not in allow:
        raise StateError(
            f"The state belongs to another plan: {'; '.join(differs)}. Its open window would be cut differently. "
            f"Restore the old values, or allow 'plan': positions stay and the open window is planned again."
        )
    return True


def _check_geometry(was: Fingerprints, now: Fingerprints, allow: Collection[str]) -> bool:
    if was.geometry == now.geometry:
        return False
    if "geometry" not in allow:
        raise StateError(
            f"The state was written with another processor geometry ({was.geometry!r}, now {now.geometry!r}), so "
            f"lengths differ and units would be cut differently. Use the old processor, or allow 'geometry': positions "
            f"stay and the open window is planned again."
        )
    return True


def _check_text(was: Fingerprints, now: Fingerprints, allow: Collection[str]) -> None:
    """Refuse other ids for the same text; the plan itself counts by the index and does not change."""
    if "tokenizer" not in allow and was.text and now.text and was.text != now.text:
        raise StateError(
            f"The state was written with another tokenizer or chat template ({was.text:.12}, now {now.text:.12}), "
            f"so the rest of the run would see other ids for the same text. Use the old processor, or allow "
            f"'tokenizer': the samples and their order stay as they are."
        )


def _check_sources(was: Fingerprints, now: Fingerprints, allow: Collection[str]) -> bool:
    """Return whether the open window cannot be planned again as it was."""
    old, new = ({name: digest for name, digest, _ in each.sources} for each in (was, now))
    gone = sorted(set(old) - set(new))
    changed = sorted(name for name in set(old) & set(new) if old[name] != new[name])
    facts = [f"source '{name}' is gone" for name in gone]
    facts += [f"source '{name}' is new" for name in sorted(set(new) - set(old))]
    facts += [f"source '{name}' has other shards, indexes or another sample_ratio" for name in changed]
    if facts and "sources" not in allow:
        raise StateError(
            f"The state belongs to another mixture: {'; '.join(facts)}. Restore it, or allow 'sources': all other "
            f"sources keep their positions."
        )
    return bool(gone or changed)


def _position(state: State, stream: SourceStream) -> int:
    """Return where a source goes on; one whose epoch has another length now goes on at the same share of it."""
    position = state.positions.get(stream.spec.name, 0)
    lengths = {name: length for name, _, length in state.fingerprints.sources}
    length = lengths.get(stream.spec.name, stream.epoch_length)
    if length == stream.epoch_length:
        return position
    epoch, offset = divmod(position, length)
    return epoch * stream.epoch_length + offset * stream.epoch_length // length


def _carry(state: State, positions: Sequence[int], streams: Sequence[SourceStream]) -> Samples:
    """Look the carried samples up again, source by source in the order of the state: packing depends on it."""
    numbers = {stream.spec.name: number for number, stream in enumerate(streams)}
    parts = []
    for source, name in enumerate(state.positions):
        _, distance, age = state.carry[state.carry[:, 0] == source][::-1].T
        if name in numbers and len(distance):
            number = numbers[name]
            found = distance <= positions[number]
            samples = streams[number].take(positions[number] - distance[found])
            parts.append(sort_carried(replace(samples, age=age[found])))
    carry = concatenate(parts)
    if len(carry) < len(state.carry):
        logger.warning("%d carried samples are gone with their source.", len(state.carry) - len(carry))
    return carry
