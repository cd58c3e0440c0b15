"""A place in the unit stream as JSON, and back.

Enters: a `Place`, what was delivered, the mixture's terms. Leaves: a dict of plain JSON values, a few KB, without
pickle and without a world size except that of a step that was interrupted. Reading it back is checked in `check.py`.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import StateError
from vlm_stream.plan.balance import BalanceConfig
from vlm_stream.plan.costs import CostConfig
from vlm_stream.plan.steps import Partial, Progress
from vlm_stream.plan.values import StepShape
from vlm_stream.plan.window import Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.plan.queue import Place
    from vlm_stream.plan.samples import Samples

__all__ = ["VERSION", "Era", "Restored", "read_state", "write_state"]

VERSION = 1


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


def write_state(
    place: Place, progress: Progress, partial: Partial | None, eras: Sequence[Era], fingerprints: dict[str, Any]
) -> dict[str, Any]:
    """Return the state as JSON values; `fingerprints` holds sources (with epoch lengths), plan fields, geometry."""
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
    }
    if prefix < len(done):
        state["done_beyond"] = _to_text(np.packbits(done[prefix:]).tobytes())
        state["done_beyond_bits"] = len(done) - prefix
    if partial is not None:
        state["partial"] = asdict(partial)
    return state


def read_state(state: dict[str, Any]) -> Restored:
    """Read a state's JSON; refuse what is not one."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise StateError(
            f"The state has version {version!r}, this release reads version {VERSION}; resuming would guess. "
            f"Resume with the release that wrote it, or start without a state."
        )
    try:
        return _read(state)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise StateError(
            f"The state is damaged ({type(error).__name__}: {error}), so its place in the stream is unknown. "
            f"Use an older checkpoint, or start without a state."
        ) from error


def _read(state: dict[str, Any]) -> Restored:
    sources = state["sources"]
    refs, age = unpack_carry(state["carry"])
    done = np.ones(state["units_done"], dtype=bool)
    if "done_beyond" in state:
        bits = np.unpackbits(np.frombuffer(_from_text(state["done_beyond"]), dtype=np.uint8))
        done = np.concatenate([done, bits[: state["done_beyond_bits"]].astype(bool)])
    delivered = state["delivered"]
    return Restored(
        window=state["window"],
        draw=state["draw"],
        units=state["units"],
        positions={s["name"]: s["epoch"] * s["length"] + s["position"] for s in sources},
        lengths={s["name"]: s["length"] for s in sources},
        digests={s["name"]: s["digest"] for s in sources},
        carry_refs=refs,
        carry_age=age,
        done=done,
        window_digest=state["window_digest"],
        planned=state["planned"],
        eras=tuple(
            Era(
                first_window=era["window"],
                terms=Terms(
                    names=tuple(era["names"]), shares=tuple(era["shares"]), stop=era["stop"], epochs=era["epochs"]
                ),
            )
            for era in state["eras"]
        ),
        partial=_read_partial(state["partial"]) if "partial" in state else None,
        progress=Progress(steps=state["step"], **delivered),
        stream_fields=dict(state["plan"]),
        geometry=state["geometry"],
    )


def _read_partial(partial: dict[str, Any]) -> Partial:
    balance = dict(partial["balance"])
    return Partial(
        shape=StepShape(**partial["shape"]),
        balance=BalanceConfig(**{**balance, "costs": CostConfig(**balance["costs"])}),
        steps_done=partial["steps_done"],
        micro_done=partial["micro_done"],
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
    raw = zlib.decompress(_from_text(text))
    count, begin = int.from_bytes(raw[:4], "little"), 4
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
