"""The cursor as JSON, with what proves that it fits.

Enters: a `Cursor` and the plan's fingerprints. Leaves: a dict of plain JSON values, about a kilobyte, without
pickle and without a world size except that of steps that were interrupted. Reading it back checks types and sizes
here, and whether it fits the plan in `resume.py`.

Carried samples are written as positions of their sources, counted back from the cursor: they were drawn a few windows
before, so their distances are small numbers. A source's samples of one age lie in front of all its older ones.
"""

from __future__ import annotations

import base64
import itertools
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.queue import Begun, Delivered
from vlm_stream.plan.values import BalanceConfig, CostConfig, StepShape
from vlm_stream.plan.window import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.queue import Cursor
    from vlm_stream.plan.window import WindowStart

    Ints = npt.NDArray[np.int64]

__all__ = ["USUAL", "Fingerprints", "State", "read_state", "write_state"]

VERSION = 3
_MAX_UNITS = 1 << 26  # units of the open windows
_MAX_CARRY = 1 << 20  # carried samples
_MAX_LOW_BITS = 40  # of a distance

# A state is small because usual values are left out. They belong to the version of the format: other defaults of the
# config do not change them.
USUAL: Final[dict[str, Any]] = {
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

    sources: tuple[tuple[str, str, int], ...]
    """Name, digest and epoch length of each."""
    plan: dict[str, Any]
    """Settings of the unit stream, without those that have their `USUAL` value."""
    geometry: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What a state says, not yet compared with a plan."""

    window: int
    draw: int
    positions: dict[str, int]
    """Samples drawn from each source, over all epochs."""
    carry: Ints
    """[c, 3] Source (as counted in `positions`), distance back from its position, age."""
    done: npt.NDArray[np.bool_]
    window_digest: str | None
    planned: int
    terms: tuple[Terms, ...]
    begun: Begun | None
    delivered: Delivered
    fingerprints: Fingerprints


def write_state(cursor: Cursor, fingerprints: Fingerprints) -> dict[str, Any]:
    """Return the state as JSON values."""
    done, window, delivered = cursor.done, cursor.window, cursor.delivered
    prefix = int(np.argmin(done)) if not done.all() else len(done)
    names = tuple(name for name, _, _ in fingerprints.sources)
    counts, distances = pack_carry(window)
    state: dict[str, Any] = {
        "version": VERSION,
        "step": delivered.steps,
        "delivered": {"units": delivered.units, "samples": delivered.samples, "digest": delivered.digest},
        "window": window.number,
        "draw": window.draw,
        "sources": [
            {"name": name, "digest": digest, "epoch": at // length, "position": at % length, "length": length}
            for (name, digest, length), at in zip(fingerprints.sources, window.positions, strict=True)
        ],
        "carry": counts,
        "distances": distances,
        "units_done": prefix,
        # Before its first unit, a window may still be planned in another way.
        "window_digest": cursor.window_digest if len(done) or cursor.begun else None,
        "planned": cursor.planned,
        "terms": [_write_terms(terms, names) for terms in _live_terms(cursor)],
        "plan": fingerprints.plan,
        "geometry": fingerprints.geometry,
        "text": fingerprints.text,
    }
    if prefix < len(done):
        state["done_beyond"] = _to_text(np.packbits(done[prefix:]).tobytes())
        state["done_beyond_bits"] = len(done) - prefix
    if cursor.begun is not None:
        state["begun"] = _write_begun(cursor.begun)
    return state


def _live_terms(cursor: Cursor) -> list[Terms]:
    """Leave out terms that ended before the cursor's window."""
    first = max((i for i, terms in enumerate(cursor.terms) if terms.first_window <= cursor.window.number), default=0)
    return list(cursor.terms[first:])


def _write_terms(terms: Terms, names: tuple[str, ...]) -> dict[str, Any]:
    values = {"window": terms.first_window, "shares": terms.shares, "stop": terms.stop, "epochs": terms.epochs}
    return values if terms.names == names else {**values, "names": terms.names}


def _write_begun(begun: Begun) -> dict[str, Any]:
    costs = list(astuple(begun.balance.costs))
    values: dict[str, Any] = {
        "shape": [begun.shape.world_size, begun.shape.micro_batches, begun.shape.batch_size],
        "barrier": begun.balance.barrier,
        "horizon": begun.balance.horizon,
        "steps_done": begun.steps_done,
        "micro_done": begun.micro_done,
    }
    return values if costs == _USUAL_COSTS else {**values, "costs": costs}


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
        return _read(_Fields(state))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise StateError(
            f"The state is damaged ({type(error).__name__}: {error}), so its place in the stream is unknown. "
            f"Use an older checkpoint, or start without a state."
        ) from error


class _Fields:
    """The values of a JSON object, each of the type and size that it must have."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise TypeError(f"an object was expected, not {type(values).__name__}")
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def count(self, name: str, most: int = 1 << 62, least: int = 0) -> int:
        return _count(name, self._values[name], most, least)

    def text(self, name: str) -> str:
        value = self._values[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r:.80}")
        return value

    def optional(self, name: str, read: Callable[[str], Any]) -> Any:
        return None if self._values[name] is None else read(name)

    def fields(self, name: str) -> _Fields:
        return _Fields(self._values[name])

    def items(self, name: str, kinds: tuple[type, ...] = (object,)) -> list[Any]:
        value = self._values[name]
        if not isinstance(value, list | tuple) or not all(isinstance(item, kinds) for item in value):
            raise TypeError(f"{name} is {value!r:.80}")
        return list(value)

    def plain(self) -> dict[str, Any]:
        """Return the values, none of which may hold others."""
        for name, value in self._values.items():
            if value is not None and not isinstance(value, bool | int | float | str):
                raise TypeError(f"{name} is {value!r:.80}")
        return dict(self._values)


def _count(name: str, value: Any, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _read(state: _Fields) -> State:
    sources = [_Fields(source) for source in state.items("sources")]
    names = tuple(source.text("name") for source in sources)
    lengths = [source.count("length", least=1) for source in sources]
    if len(set(names)) < len(names):
        raise ValueError("sources without a name of their own")
    counts = [
        [_count("carry", count, _MAX_CARRY) for count in ages] for ages in state.items("carry", kinds=(list, tuple))
    ]
    if len(counts) != len(names):
        raise ValueError("carried samples of other sources")
    window = state.count("window")
    terms = tuple(_read_terms(_Fields(each), names) for each in state.items("terms"))
    if not terms or terms[0].first_window > window:
        raise ValueError("no terms of the mixture hold for the open window")
    delivered = state.fields("delivered")
    return State(
        window=window,
        draw=state.count("draw"),
        positions={
            name: source.count("epoch", 1 << 32) * length + source.count("position", length - 1)
            for name, length, source in zip(names, lengths, sources, strict=True)
        },
        carry=unpack_carry(counts, state.text("distances")),
        done=_read_done(state),
        window_digest=state.optional("window_digest", state.text),
        planned=state.count("planned"),
        terms=terms,
        begun=_read_begun(state.fields("begun")) if "begun" in state else None,
        delivered=Delivered(
            steps=state.count("step"),
            units=delivered.count("units"),
            samples=delivered.count("samples"),
            digest=bytes.fromhex(delivered.text("digest")).hex(),
        ),
        fingerprints=Fingerprints(
            sources=tuple(zip(names, [source.text("digest") for source in sources], lengths, strict=True)),
            plan=state.fields("plan").plain(),
            geometry=state.text("geometry"),
            text=state.text("text"),
        ),
    )


def _read_done(state: _Fields) -> npt.NDArray[np.bool_]:
    done = np.ones(state.count("units_done", _MAX_UNITS), dtype=bool)
    if "done_beyond" not in state:
        return done
    bits = np.unpackbits(np.frombuffer(_from_text(state.text("done_beyond")), dtype=np.uint8))
    num_bits = state.count("done_beyond_bits", min(_MAX_UNITS, len(bits)), least=1)
    return np.concatenate([done, bits[:num_bits].astype(bool)])


def _read_terms(terms: _Fields, sources: tuple[str, ...]) -> Terms:
    names = tuple(terms.items("names", kinds=(str,))) if "names" in terms else sources
    shares = tuple(terms.items("shares", kinds=(int, float)))
    if len(names) != len(shares) or not all(0 <= share <= 1 for share in shares):
        raise ValueError("shares of the mixture")
    return Terms(
        first_window=terms.count("window"),
        names=names,
        shares=shares,
        stop=terms.text("stop"),
        epochs=terms.optional("epochs", lambda name: terms.count(name, 1 << 32)),
    )


def _read_begun(begun: _Fields) -> Begun:
    world_size, micro_batches, batch_size = (_count("shape", n, 1 << 31, 1) for n in begun.items("shape"))
    shape = StepShape(world_size=world_size, micro_batches=micro_batches, batch_size=batch_size)
    costs = begun.items("costs", kinds=(int, float)) if "costs" in begun else _USUAL_COSTS
    llm_linear, llm_square, vit_linear, vit_square = costs
    balance = BalanceConfig(
        barrier=begun.text("barrier"),
        horizon=begun.count("horizon", 1 << 20, least=1),
        costs=CostConfig(llm_linear=llm_linear, llm_square=llm_square, vit_linear=vit_linear, vit_square=vit_square),
    )
    if shape.units_per_step * balance.horizon > _MAX_UNITS:
        raise ValueError(f"shape is {begun.items('shape')!r:.80}")
    return Begun(
        shape=shape,
        balance=balance,
        steps_done=begun.count("steps_done", balance.horizon - 1),
        micro_done=begun.count("micro_done", shape.micro_batches - 1),
    )


def _to_text(raw: bytes) -> str:
    return base64.b85encode(raw).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b85decode(text.encode("ascii"))
