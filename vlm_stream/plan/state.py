"""The cursor as JSON, with what proves that it fits.

Enters: a `Cursor` and the plan's fingerprints. Leaves: a dict of plain JSON values, less than a kilobyte, without
pickle and without a world size except that of steps that were interrupted. Reading it back checks types and sizes
here, and whether it fits the plan in `resume.py`.

Carried samples are written as positions of their sources, counted back from the cursor: they were drawn a few windows
before, so their distances are small numbers. A source's samples of one age lie in front of all its older ones.
"""

import base64
import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.queue import Begun, Cursor, Delivered
from vlm_stream.plan.values import BalanceConfig, CostConfig, Ints, StepShape
from vlm_stream.plan.window import Terms, WindowStart

VERSION = 4
_MAX_UNITS = 1 << 26  # units of the open windows
_MAX_CARRY = 1 << 20  # carried samples
_MAX_AHEAD = 1 << 20  # windows that are planned ahead of the open one
_MAX_LOW_BITS = 40  # of a distance

# A state is small because usual values are left out. They belong to the version of the format: other defaults of the
# config do not change them.
USUAL: Final[dict[str, Any]] = {
    "seed": 0,
    "window": 4096,
    "shuffle": True,
    "mode.packing_ratio": 1.0,
    "mode.long_samples": "drop",
    "mode.alignment": 1,
    "order.group_shards": 256,
    "order.run_length": 1,
}
_USUAL_COSTS: Final = [1.0, 1.4e-5, 0.09, 1.5e-6]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """What a state must find again."""

    sources: tuple[tuple[str, str, int], ...]  # name, digest and epoch length of each
    plan: dict[str, Any]  # settings of the unit stream, without those that have their `USUAL` value
    geometry: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What a state says, not yet compared with a plan."""

    window: int
    draw: int
    positions: dict[str, int]  # samples drawn from each source, over all epochs
    carry: Ints  # [c, 3] Source (as counted in `positions`), distance back from its position, age
    done: npt.NDArray[np.bool_]
    window_digest: str | None
    planned: int
    terms: tuple[Terms, ...]
    begun: Begun | None
    delivered: Delivered
    fingerprints: Fingerprints


def write_state(cursor: Cursor, fingerprints: Fingerprints) -> dict[str, Any]:
    done, window, delivered = cursor.done, cursor.window, cursor.delivered
    prefix = int(np.argmin(done)) if not done.all() else len(done)
    names = tuple(name for name, _, _ in fingerprints.sources)
    state: dict[str, Any] = {
        "version": VERSION,
        "delivered": list(astuple(delivered)),
        "window": window.number,
        "draw": window.draw,
        "sources": [
            [name, digest, length, position]
            for (name, digest, length), position in zip(fingerprints.sources, window.positions, strict=True)
        ],
        "carry": pack_carry(window),
        "done": prefix,
        # Before its first unit, a window may still be planned in another way.
        "digest": cursor.window_digest if len(done) or cursor.begun else None,
        "planned": cursor.planned,
        "terms": [_write_terms(terms, names) for terms in _live_terms(cursor)],
        "plan": fingerprints.plan,
        "geometry": fingerprints.geometry,
        "text": fingerprints.text,
    }
    if prefix < len(done):
        state["done_beyond"] = [len(done) - prefix, _to_text(np.packbits(done[prefix:]).tobytes())]
    if cursor.begun is not None:
        begun, balance = cursor.begun, cursor.begun.balance
        costs = list(astuple(balance.costs))
        shape = [balance.barrier, balance.horizon, begun.steps_done, begun.micro_done]
        state["begun"] = [*astuple(begun.shape), *shape, *([] if costs == _USUAL_COSTS else costs)]
    return state


def _live_terms(cursor: Cursor) -> list[Terms]:
    """Leave out terms that ended before the cursor's window."""
    first = max((i for i, terms in enumerate(cursor.terms) if terms.first_window <= cursor.window.number), default=0)
    return list(cursor.terms[first:])


def _write_terms(terms: Terms, names: tuple[str, ...]) -> list[Any]:
    values = [terms.first_window, terms.stop, terms.epochs, terms.shares]
    return values if terms.names == names else [*values, terms.names]


def pack_carry(window: WindowStart) -> tuple[list[list[int]], str]:
    """Return how many samples of each source have the ages 1, 2, ..., and their distances back as text.

    Distances of a source ascend, and so do their ages; what is written is the gap from each to the next.
    """
    refs, age = window.carry.refs, window.carry.age
    distance = np.asarray(window.positions, dtype=np.int64)[refs[:, 0]] - window.carry.position
    counts: list[list[int]] = []
    gaps: list[int] = []
    for source in range(len(window.positions)):
        mine = refs[:, 0] == source
        counts.append(np.bincount(age[mine])[1:].tolist())
        gaps += np.diff(np.sort(distance[mine]), prepend=0).tolist()
    return counts, _pack_gaps(gaps)


def _pack_gaps(gaps: list[int]) -> str:
    """Write numbers by Exp-Golomb coding.

    With k low bits, 2^k is added to each; then come as many 1s as it has bits above the k low ones and the first, a 0,
    and all its bits but the first. For k=2: 0 -> 000, 3 -> 011, 4 -> 10000.
    """
    if not gaps:
        return ""
    texts = ["".join(_code(gap, low) for gap in gaps) for low in _low_bits(gaps)]
    low, bits = min(zip(_low_bits(gaps), texts, strict=True), key=lambda pair: len(pair[1]))
    bits += "1" * (-len(bits) % 8)
    return _to_text(bytes([low]) + int(bits, 2).to_bytes(len(bits) // 8, "big"))


def _code(number: int, low: int) -> str:
    bits = format(number + (1 << low), "b")
    return "1" * (len(bits) - 1 - low) + "0" + bits[1:]


def _low_bits(gaps: list[int]) -> range:
    """Return the numbers of low bits that may be the best: those around the mean."""
    mean = (sum(gaps) // len(gaps)).bit_length()
    return range(max(mean - 3, 0), min(mean + 1, _MAX_LOW_BITS) + 1)


def unpack_carry(counts: Sequence[Sequence[int]], text: str) -> Ints:
    """Read what `pack_carry` wrote: [c, 3] source, distance back, age."""
    gaps = iter(_unpack_gaps(text, sum(map(sum, counts))))
    carry = []
    for source, ages in enumerate(counts):
        distance = 0
        for age, count in enumerate(ages, start=1):
            for gap in itertools.islice(gaps, count):
                distance += gap
                carry.append((source, distance, age))
    return np.asarray(carry, dtype=np.int64).reshape(-1, 3)


def _unpack_gaps(text: str, count: int) -> list[int]:
    raw = _from_text(text)
    low = raw[0] if raw else 0
    bits = "".join(format(byte, "08b") for byte in raw[1:])
    gaps = []
    at = 0
    while (zero := bits.find("0", at)) >= 0 and low <= _MAX_LOW_BITS:
        end = zero + 1 + (zero - at) + low
        gaps.append(int("1" + bits[zero + 1 : end], 2) - (1 << low))
        at = end
    if len(gaps) != count or not 0 <= len(bits) - at < 8:
        raise ValueError("the carried samples do not have the size that they name")
    return gaps


def read_state(state: Any) -> State:
    """Read a state's JSON; refuse what is not one."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise StateError(
            f"The state has version {version!r}, this release reads version {VERSION}; resuming would guess. "
            f"Resume with the release that wrote it, or start without a state."
        )
    try:
        return _read(state)
    except (KeyError, TypeError, ValueError, OverflowError, ConfigError) as error:
        raise StateError(
            f"The state is damaged ({type(error).__name__}: {error}), so its place in the stream is unknown. "
            f"Use an older checkpoint, or start without a state."
        ) from error


def _count(name: str, value: Any, most: int = 1 << 62, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.80}")
    return value


def _items(name: str, value: Any, *kinds: type) -> list[Any]:
    """Return a list whose items are of some kinds; of any, where none is named."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, kinds or object) for item in value):
        raise TypeError(f"{name} is {value!r:.80}")
    return list(value)


def _read(state: dict[str, Any]) -> State:
    sources = []
    positions = {}
    for row in _items("sources", state["sources"]):
        name, digest, length, position = _items("sources", row)
        sources.append((_text("name", name), _text("digest", digest), _count("length", length, least=1)))
        positions[name] = _count("position", position)
    if len(positions) < len(sources):
        raise ValueError("sources without a name of their own")
    ages, distances = _items("carry", state["carry"])
    counts = [[_count("carry", count, _MAX_CARRY) for count in each] for each in _items("carry", ages, list, tuple)]
    if len(counts) != len(sources):
        raise ValueError("carried samples of other sources")
    window = _count("window", state["window"])
    terms = tuple(_read_terms(_items("terms", each), tuple(positions)) for each in _items("terms", state["terms"]))
    if not terms or terms[0].first_window > window:
        raise ValueError("no terms of the mixture hold for the open window")
    steps, units, samples, digest = _items("delivered", state["delivered"])
    if not isinstance(plan := state["plan"], dict):
        raise TypeError(f"plan is {plan!r:.80}")
    window_digest = state["digest"]
    return State(
        window=window,
        draw=_count("draw", state["draw"]),
        positions=positions,
        carry=unpack_carry(counts, _text("carry", distances)),
        done=_read_done(state),
        window_digest=None if window_digest is None else _text("digest", window_digest),
        planned=_count("planned", state["planned"], window + _MAX_AHEAD, window),
        terms=terms,
        begun=_read_begun(_items("begun", state["begun"])) if "begun" in state else None,
        delivered=Delivered(
            steps=_count("steps", steps),
            units=_count("units", units),
            samples=_count("samples", samples),
            digest=bytes.fromhex(_text("digest", digest)).hex(),
        ),
        fingerprints=Fingerprints(
            sources=tuple(sources),
            plan=dict(zip(plan, _items("plan", list(plan.values()), bool, int, float, str, type(None)), strict=True)),
            geometry=_text("geometry", state["geometry"]),
            text=_text("text", state["text"]),
        ),
    )


def _read_done(state: dict[str, Any]) -> npt.NDArray[np.bool_]:
    done = np.ones(_count("done", state["done"], _MAX_UNITS), dtype=bool)
    if "done_beyond" not in state:
        return done
    num_bits, text = _items("done_beyond", state["done_beyond"])
    bits = np.unpackbits(np.frombuffer(_from_text(_text("done_beyond", text)), dtype=np.uint8))
    num_bits = _count("done_beyond", num_bits, min(_MAX_UNITS, len(bits)), least=1)
    return np.concatenate([done, bits[:num_bits].astype(bool)])


def _read_terms(row: list[Any], sources: tuple[str, ...]) -> Terms:
    first_window, stop, epochs, shares, *others = row
    names = tuple(_items("terms", others[0], str)) if others else sources
    shares = tuple(_items("shares", shares, int, float))
    if len(names) != len(shares) or not all(0 <= share <= 1 for share in shares):
        raise ValueError("shares of the mixture")
    return Terms(
        first_window=_count("window", first_window),
        names=names,
        shares=shares,
        stop=_text("stop", stop),
        epochs=None if epochs is None else _count("epochs", epochs, 1 << 32),
    )


def _read_begun(row: list[Any]) -> Begun:
    *sizes, barrier, horizon, steps_done, micro_done = row[:7]
    world_size, micro_batches, batch_size = (_count("shape", size, 1 << 31, 1) for size in sizes)
    shape = StepShape(world_size=world_size, micro_batches=micro_batches, batch_size=batch_size)
    llm_linear, llm_square, vit_linear, vit_square = _items("costs", row[7:] or _USUAL_COSTS, int, float)
    balance = BalanceConfig(
        barrier=_text("barrier", barrier),
        horizon=_count("horizon", horizon, 1 << 20, least=1),
        costs=CostConfig(llm_linear=llm_linear, llm_square=llm_square, vit_linear=vit_linear, vit_square=vit_square),
    )
    if shape.units_per_step * balance.horizon > _MAX_UNITS:
        raise ValueError(f"shape is {sizes!r:.80}")
    return Begun(
        shape=shape,
        balance=balance,
        steps_done=_count("steps_done", steps_done, balance.horizon - 1),
        micro_done=_count("micro_done", micro_done, micro_batches - 1),
    )


def _to_text(raw: bytes) -> str:
    return base64.b85encode(raw).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b85decode(text.encode("ascii"))
