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

_LARGE_BYTES: Final = 1 << 16


class Parcel(NamedTuple):
    """A value, taken apart."""

    text: bytes
    buffers: list[np.ndarray[Any, np.dtype[np.uint8]]]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduce(value) if isinstance(value, torch.Tensor) else NotImplemented


def pack(value: Any) -> Parcel:
    """Take a value apart.

    Raises:
        WorkerError: Something in it cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:  # a class may fail in any way when it is taken apart
        raise WorkerError(
            f"a batch cannot be sent by its builder ({type(error).__name__}: {error}), so the run ends here; its "
            f"state is good. Let collate_fn return tensors, arrays, text and numbers, or set num_workers=0."
        ) from error
    return Parcel(file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


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


def _reduce(tensor: torch.Tensor) -> Any:
    if (saved := save_odd(tensor)) is not None:
        return load_odd, (saved,)
    flat = flat_bytes(tensor)
    data: Any = pickle.PickleBuffer(flat) if flat.nbytes >= _LARGE_BYTES else flat.tobytes()
    return from_bytes, (data, tensor.dtype, tuple(tensor.shape))
