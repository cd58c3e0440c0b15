"""The state of a run: one JSON text under one key, the same shape for a new run and a used one.

Enters: where a run stands. Leaves: `{"vlm_stream": text}`, which goes through every checkpoint format that keeps text.
The text begins with a checksum of the rest, so that no altered state is taken for another place; what is behind it is
read by type and bounded in size (`plan/state.py`), because a checksum keeps out accidents only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from vlm_stream.errors import StateError
from vlm_stream.plan import read_state

STATE_KEY: Final = "vlm_stream"
_VERSION: Final = 2
_PREFIX: Final = '{"checksum":"'
_MAX_CHARACTERS: Final = 1 << 25
_MAX_COUNT: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands."""

    plan: dict[str, Any] | None = None
    """State of the plan behind the last batch; None: at the start."""
    rounds: int = 0
    """Iterations that have come to their end."""
    batches: int = 0
    """Batches that this rank took in the present one."""
    length: tuple[str, int] | None = None
    """How many the present one has in all, behind what that count depends on; None: not counted yet."""
    skip: int | None = None
    """Micro-batches behind that place that belong to other workers: of a stream that is one of several workers."""
    terms: str | None = None
    """What these micro-batches depend on, ranks among it (`length_key`): workers agree only while it is the same."""

    def to_dict(self) -> dict[str, str]:
        """Return the state as a checkpoint keeps it; values that are those of a new run are left out."""
        told = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        body = json.dumps({"version": _VERSION, **told}, separators=(",", ":"), allow_nan=False)
        return {STATE_KEY: f'{_PREFIX}{_checksum(body)}","state":{body}}}'}

    @classmethod
    def from_dict(cls, state: Any) -> RunState:
        """Return what `to_dict` wrote, and refuse what is damaged, changed, or of another release."""
        if not isinstance(state, Mapping) or STATE_KEY not in state:
            raise StateError(
                f"this is not the state of a StreamLoader (it has no '{STATE_KEY}' entry), so there is no position to "
                f"go on from; pass what state_dict() returned, unwrapped from your checkpoint"
            )
        found = cls(**_body(state[STATE_KEY]))
        _check_counts(found)
        return found


def find_states(checkpoint: Any) -> list[dict[str, str]]:
    """Return the states in a checkpoint, however deep they lie in it."""
    if isinstance(checkpoint, Mapping):
        if isinstance(checkpoint.get(STATE_KEY), str):
            return [{STATE_KEY: checkpoint[STATE_KEY]}]
        return [state for value in checkpoint.values() for state in find_states(value)]
    if isinstance(checkpoint, list | tuple):
        return [state for value in checkpoint for state in find_states(value)]
    return []


def _checksum(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


def _body(text: Any) -> dict[str, Any]:
    """Return the values behind the checksum, each of its type."""
    if not isinstance(text, str):
        raise StateError(
            f"the state's '{STATE_KEY}' is a {type(text).__name__}, not the text that state_dict() returns, so it was "
            f"changed or written by another release; use an older checkpoint, or start without a state"
        )
    begin = len(_PREFIX)
    checksum, body = text[begin : begin + 16], text[begin + 26 : -1]
    if len(text) > _MAX_CHARACTERS or text != f'{_PREFIX}{checksum}","state":{body}}}' or checksum != _checksum(body):
        raise StateError(
            "the state is damaged: its text does not have the checksum that it names, so its place in the stream is "
            "unknown; use an older checkpoint, or start without a state"
        )
    try:
        values = json.loads(body)
        version = values.pop("version")
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(error) from error
    if version != _VERSION:
        raise StateError(
            f"the state has version {version!r:.40}, and this release reads version {_VERSION}; resume with the "
            f"release that wrote it, or start without a state"
        )
    usual = {each.name: each.default for each in fields(RunState)}
    if not set(values) <= set(usual):
        raise _damaged("other values than a state has")
    read: dict[str, Any] = usual | values
    length, skip = read["length"], read["skip"]
    if isinstance(length, list):
        read["length"] = length = tuple(length)
    is_sound = {
        "plan": read["plan"] is None or isinstance(read["plan"], dict),
        "rounds": _is_count(read["rounds"]),
        "batches": _is_count(read["batches"]),
        "length": length is None
        or (isinstance(length, tuple) and len(length) == 2 and isinstance(length[0], str) and _is_count(length[1])),
        "skip": skip is None or _is_count(skip),
        "terms": read["terms"] is None or isinstance(read["terms"], str),
    }
    for name, sound in is_sound.items():
        if not sound:
            raise _damaged(f"its {name} is {read[name]!r:.80}")
    return read


def _check_counts(found: RunState) -> None:
    """Refuse a place that no run comes to: a loader would plan rounds without end to go on from there."""
    most_rounds = 0
    if found.plan is not None:
        plan = read_state(found.plan)
        epochs = plan.terms[-1].epochs
        most_rounds = plan.delivered.steps if epochs is None else min(epochs, plan.delivered.steps)
    if found.rounds > most_rounds:
        raise _damaged(f"its rounds are {found.rounds}, and its plan has come to the end of {most_rounds} at most")
    if found.batches and found.plan is None:
        raise _damaged(f"its batches are {found.batches}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _damaged(what: object) -> StateError:
    return StateError(
        f"the state is damaged ({what}), so its place in the stream is unknown; use an older checkpoint, or start "
        f"without a state"
    )
