"""Batches as bytes and large buffers: how they travel between machines, and between loaders of one machine.

Enters: a delivery. Leaves: a few kilobytes of pickled text, and the memory of its large tensors, which whoever sends it
may place where the other side reads it without a copy. Small tensors are part of the text.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from vlm_stream.blocks import flat_bytes, from_bytes, load_odd, save_odd
from vlm_stream.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.blocks import BlockPool

_LARGE_BYTES: Final = 1 << 16


class Parcel(NamedTuple):
    """A value, taken apart."""

    text: bytes
    buffers: list[np.ndarray[Any, np.dtype[np.uint8]]]


class _Pickler(pickle.Pickler):
    blocks: BlockPool | None = None

    def reducer_override(self, value: Any) -> Any:
        return _reduce(value, self.blocks) if isinstance(value, torch.Tensor) else NotImplemented


def pack(value: Any, blocks: BlockPool | None = None) -> Parcel:
    """Take a value apart; with blocks, for a process that reads these: what is left then is a word about where it lies.

    Raises:
        WorkerError: Something in it cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.blocks = blocks
    try:
        pickler.dump(value)
    except Exception as error:  # a class may fail in any way when it is taken apart
        raise WorkerError(
            f"a batch cannot be sent by its builder ({type(error).__name__}: {error}), so the run ends here; its "
            f"state is good. Let collate_fn return tensors, arrays, text and numbers, or set num_workers=0."
        ) from error
    parcel = Parcel(file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])
    is_small = not parcel.buffers and len(parcel.text) < _LARGE_BYTES
    if blocks is None or is_small or (joined := _Joined.within(blocks, parcel)) is None:
        return parcel
    return pack(joined, blocks)


class _Joined:
    """A parcel in a block; unpickled it is what was packed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @classmethod
    def within(cls, blocks: BlockPool, parcel: Parcel) -> _Joined | None:
        parts = join(parcel)
        memory = blocks.allocate(sum(part.nbytes for part in parts))
        if memory is None:
            return None
        at, array = 0, memory.numpy()
        for part in parts:
            array[at : at + part.nbytes] = part
            at += part.nbytes
        return cls(memory)

    def __reduce__(self) -> Any:
        return _take, (self._memory,)


def _take(memory: torch.Tensor) -> Any:
    text, buffers = split(memory.numpy())
    return pickle.loads(text, buffers=buffers)  # noqa: S301 - of our own making


def join(parcel: Parcel) -> list[memoryview]:
    """Return what a parcel is in one row of bytes: how long its parts are, its text, its buffers.

    Each buffer begins at a multiple of 64 bytes.
    """
    head = pickle.dumps((len(parcel.text), [buffer.nbytes for buffer in parcel.buffers]))
    begin = len(head).to_bytes(8, "little") + head + parcel.text
    parts = [memoryview(begin)]
    for buffer in parcel.buffers:
        parts += [memoryview(bytes(-parts[-1].nbytes % 64)), buffer.data]
    return parts


def split(data: Any) -> Parcel:
    """Return the parcel whose bytes these are, an array of them; its buffers are in the same memory."""
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    text_size, sizes = pickle.loads(data[8:at].tobytes())  # noqa: S301 - of our own making
    text, at = data[at : at + text_size].tobytes(), at + text_size
    buffers = []
    for size in sizes:
        at += -at % 64
        buffers.append(data[at : at + size])
        at += size
    return Parcel(text, buffers)


def unpack(text: bytes, buffers: Sequence[Any], *, copies: bool) -> Any:
    """Put a value together again.

    Args:
        text: Of a parcel of our own making.
        buffers: Its large parts, as arrays of bytes.
        copies: Whether others read the same memory: tensors then get memory of their own, for trainers may write.
    """
    return pickle.loads(text, buffers=[buffer.copy() if copies else _Writable(buffer).array for buffer in buffers])  # noqa: S301


class _Writable:
    """An array over the same memory that may be written: Ray and mmap mark it, in case that others read it."""

    def __init__(self, buffer: Any) -> None:
        self.__array_interface__ = {
            "data": (buffer.ctypes.data, False),
            "shape": buffer.shape,
            "typestr": "|u1",
            "version": 3,
        }
        self._buffer = buffer  # keeps the memory alive

    @property
    def array(self) -> Any:
        return np.asarray(self)


def _reduce(tensor: torch.Tensor, blocks: BlockPool | None) -> Any:
    if (saved := save_odd(tensor)) is not None:
        return load_odd, (saved,)
    if blocks is not None and (place := blocks.place(tensor)) is not None:
        return place
    flat = flat_bytes(tensor)
    data: Any = pickle.PickleBuffer(flat) if flat.nbytes >= _LARGE_BYTES else flat.tobytes()
    return from_bytes, (data, tensor.dtype, tuple(tensor.shape))
