"""A place in the unit stream as JSON, and back.

Enters: a `Place`, what was delivered, the mixture's terms. Leaves: a dict of plain JSON values, a few KB, without
pickle and without a world size except that of a step that was interrupted. Reading it back checks types and sizes here
and whether it fits the plan in `check.py`.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.plan.balance import BalanceConfig
from vlm_stream.plan.costs import CostConfig
from vlm_stream.plan.steps import Partial, Progress
from vlm_stream.plan.values import StepShape
from vlm_stream.plan.window import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from vlm_stream.plan.queue import Place
    from vlm_stream.plan.samples import Samples

__all__ = ["VERSION", "Era", "Restored", "read_state", "write_state"]

VERSION = 2
_MAX_UNITS = 1 << 26  # units of the open windows
_MAX_CARRY = 1 << 20  # carried samples
_BYTES_PER_CARRIED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """Terms of the mixture, and the first window that was drawn under them."""

    first_window: int
    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """What a state says, still unchecked."""

    window: int
    draw: int
    units: int
    positions: dict[str, int]
    """Samples drawn from each source, over all epochs."""
    lengths: dict[str, int]
    """Samples in an epoch of each source."""
    digests: dict[str, str]
    carry_refs: npt.NDArray[np.int64]
    """[c, 3]; its sources count the names of `positions`."""
    carry_age: npt.NDArray[np.int64]
    done: npt.NDArray[np.bool_]
    """Units from the window's start on that were delivered."""
    window_digest: str | None
    planned: int
    eras: tuple[Era, ...]
    partial: Partial | None
    progress: Progress
    stream_fields: dict[str, Any]
    geometry: str
    text: str


def write_state(
    place: Place, progress: Progress, partial: Partial | None, eras: Sequence[Era], fingerprints: dict[str, Any]
) -> dict[str, Any]:
    """Return the state as JSON values; `fingerprints` holds sources (with epoch lengths), plan, geometry, text."""
    done = place.done()
    prefix = int(np.argmin(done)) if not done.all() else len(done)
    cursor = place.cursor
    planned_first = bool(place.windows) and (len(done) > 0 or partial is not None)
    state: dict[str, Any] = {
        "version": VERSION,
        "step": progress.steps,
        "delivered": {"units": progress.units, "samples": progress.samples, "digest": progress.digest},
        "window": cursor.window,
        "draw": cursor.draw,
        "units": cursor.units,
        "sources": [
            {
                "name": name,
                "digest": digest,
                "epoch": position // length,
                "position": position % length,
                "length": length,
            }
            for (name, digest, length), position in zip(fingerprints["sources"], cursor.positions, strict=True)
        ],
        "carry": pack_carry(cursor.carry),
        "units_done": prefix,
        "window_digest": place.windows[0].digest if planned_first else None,
        "planned": place.planned,
        "eras": [
            # By hand, as the rest: `asdict` copies all the way down, and this is written behind every batch.
            {
                "window": era.first_window,
                "names": era.terms.names,
                "shares": era.terms.shares,
                "stop": era.terms.stop,
                "epochs": era.terms.epochs,
            }
            for era in _live_eras(eras, cursor.window)
        ],
        "plan": fingerprints["plan"],
        "geometry": fingerprints["geometry"],
        "text": fingerprints["text"],
    }
    if prefix < len(done):
        state["done_beyond"] = _to_text(np.packbits(done[prefix:]).tobytes())
        state["done_beyond_bits"] = len(done) - prefix
    if partial is not None:
        state["partial"] = asdict(partial)
    return state


def read_state(state: Any) -> Restored:
    """Read a state's JSON; refuse what is not one."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise StateError(
            f"The state has version {version!r}, this release reads version {VERSION}; resuming would guess. "
            f"Resume with the release that wrote it, or start without a state."
        )
    try:
        return _read(_Fields(state))
    except (KeyError, TypeError, ValueError, ConfigError, zlib.error) as error:
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
        value = self._values[name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r:.80}")
        return value

    def text(self, name: str) -> str:
        value = self._values[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r:.80}")
        return value

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r:.80}")
        return value

    def optional(self, name: str, read: Callable[[str], Any]) -> Any:
        return None if self._values[name] is None else read(name)

    def fields(self, name: str) -> _Fields:
        return _Fields(self._values[name])

    def items(self, name: str) -> list[Any]:
        value = self._values[name]
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} is {value!r:.80}")
        return list(value)

    def plain(self) -> dict[str, Any]:
        """Return the values, none of which may hold others."""
        for name, value in self._values.items():
            if value is not None and not isinstance(value, bool | int | float | str):
                raise TypeError(f"{name} is {value!r:.80}")
        return dict(self._values)


def _read(state: _Fields) -> Restored:
    sources = [_Fields(source) for source in state.items("sources")]
    names = [source.text("name") for source in sources]
    lengths = [source.count("length", least=1) for source in sources]
    refs, age = unpack_carry(state.text("carry"))
    if len(set(names)) < len(names) or (len(refs) and refs[:, 0].max() >= len(names)):
        raise ValueError("carried samples or sources without a name of their own")
    done = np.ones(state.count("units_done", _MAX_UNITS), dtype=bool)
    if "done_beyond" in state:
        bits = np.unpackbits(np.frombuffer(_from_text(state.text("done_beyond")), dtype=np.uint8))
        if not 0 < state.count("done_beyond_bits", _MAX_UNITS) <= len(bits):
            raise ValueError("done_beyond_bits")
        done = np.concatenate([done, bits[: state.count("done_beyond_bits")].astype(bool)])
    delivered = state.fields("delivered")
    window = state.count("window")
    eras = tuple(_read_era(_Fields(era)) for era in state.items("eras"))
    if not eras or eras[0].first_window > window:
        raise ValueError("no terms of the mixture hold for the open window")
    return Restored(
        window=window,
        draw=state.count("draw"),
        units=state.count("units"),
        positions={
            name: source.count("epoch", 1 << 32) * length + source.count("position", length - 1)
            for name, length, source in zip(names, lengths, sources, strict=True)
        },
        lengths=dict(zip(names, lengths, strict=True)),
        digests={name: source.text("digest") for name, source in zip(names, sources, strict=True)},
        carry_refs=refs,
        carry_age=age,
        done=done,
        window_digest=state.optional("window_digest", state.text),
        planned=state.count("planned"),
        eras=eras,
        partial=_read_partial(state.fields("partial")) if "partial" in state else None,
        progress=Progress(
            steps=state.count("step"),
            units=delivered.count("units"),
            samples=delivered.count("samples"),
            digest=bytes.fromhex(delivered.text("digest")).hex(),
        ),
        stream_fields=state.fields("plan").plain(),
        geometry=state.text("geometry"),
        text=state.text("text"),
    )


def _read_era(era: _Fields) -> Era:
    names, shares = era.items("names"), era.items("shares")
    if len(names) != len(shares) or not all(isinstance(name, str) for name in names):
        raise TypeError("names of an era")
    if not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares):
        raise TypeError("shares of an era")
    stop, epochs = era.text("stop"), era.optional("epochs", lambda name: era.count(name, 1 << 32))
    terms = Terms(names=tuple(names), shares=tuple(shares), stop=stop, epochs=epochs)
    return Era(first_window=era.count("window"), terms=terms)


def _read_partial(partial: _Fields) -> Partial:
    shape = StepShape(**partial.fields("shape").plain())
    if any(type(getattr(shape, name)) is not int for name in ("world_size", "micro_batches", "batch_size")):
        raise TypeError("shape of a step")
    balance = partial.fields("balance")
    costs = CostConfig(**balance.fields("costs").plain())
    config = BalanceConfig(
        barrier=balance.text("barrier"),
        horizon=balance.count("horizon", 1 << 20, least=1),
        small_ends=balance.flag("small_ends"),
        costs=costs,
    )
    return Partial(
        shape=shape,
        balance=config,
        steps_done=partial.count("steps_done", config.horizon - 1),
        micro_done=partial.count("micro_done", shape.micro_batches - 1),
    )


def _live_eras(eras: Sequence[Era], window: int) -> list[Era]:
    """Leave out the eras that ended before that window."""
    first = max((i for i, era in enumerate(eras) if era.first_window <= window), default=0)
    return list(eras[first:])


def pack_carry(carry: Samples) -> str:
    """Write refs and ages column by column, as differences where they are sorted: about 4 bytes a sample."""
    refs = carry.refs
    if not len(refs):
        return ""
    shard = np.diff(refs[:, 1], prepend=0)
    columns = [refs[:, 0].astype("<u2"), carry.age.astype("<u2"), shard.astype("<i4"), refs[:, 2].astype("<u4")]
    raw = b"".join(column.view(np.uint8).reshape(len(refs), -1).T.tobytes() for column in columns)
    return _to_text(zlib.compress(len(refs).to_bytes(4, "little") + raw, 9))


def unpack_carry(text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Read what `pack_carry` wrote: [c, 3] refs and [c] ages."""
    if not text:
        return np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64)
    opened = zlib.decompressobj()
    raw = opened.decompress(_from_text(text), 4 + _MAX_CARRY * _BYTES_PER_CARRIED)
    count, begin = int.from_bytes(raw[:4], "little"), 4
    if not opened.eof or len(raw) != 4 + count * _BYTES_PER_CARRIED:
        raise ValueError("the carried samples do not have the size that they name")
    columns = []
    for dtype in ("<u2", "<u2", "<i4", "<u4"):
        width = np.dtype(dtype).itemsize
        planes = np.frombuffer(raw, dtype=np.uint8, count=count * width, offset=begin).reshape(width, count)
        columns.append(np.ascontiguousarray(planes.T).view(dtype).ravel().astype(np.int64))
        begin += count * width
    source, age, shard, row = columns
    return np.stack([source, np.cumsum(shard), row], axis=1), age


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)
