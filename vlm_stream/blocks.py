"""Blocks of memory that a worker fills and its parent reads, over and over.

A pack's pixels are a hundred megabytes. In fresh shared memory every page of them is a fault in the worker and another
in the parent, which takes eight times as long as writing the values. So a worker keeps a few blocks: it joins pixels in
one, the parent maps it (once) and says when it has dropped the last tensor in it, and the worker fills it again.

Blocks are files without a name (`memfd`), opened by the parent through the worker's entry in /proc: nothing is left
behind by a kill, and a hung worker need not be asked. Where that cannot be done (not Linux, no right to look at the
worker), there are no blocks, and tensors travel as torch sends them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

__all__ = ["BlockReader", "allocate_block", "offer_blocks"]

_STEP: Final = 1 << 22


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    descriptor: int
    size: int
    pages: mmap.mmap
    use: int = 0
    """How many times it was taken: a tensor of an earlier use may still be around."""
    is_free: bool = True
    is_sent: bool = False


class _Pool:
    """The blocks of a worker."""

    def __init__(self, returned: Any) -> None:
        self._returned = returned
        self._blocks: list[_Block] = []
        self._at: dict[int, tuple[_Block, int]] = {}
        """Blocks and their uses, by address."""
        self._lock = threading.Lock()  # batches are pickled by a thread of the queue
        self._is_welcome = False

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return bytes of a block; None where the parent cannot read blocks, or memory is short."""
        while not self._returned.empty():
            number = self._returned.get()
            if number is None:
                self._is_welcome = True
            else:
                self._blocks[number].is_free, self._blocks[number].is_sent = True, False
        if not self._is_welcome:
            return None
        with self._lock:
            block = self._take(num_bytes)
            if block is None:
                return None
            block.is_free, block.is_sent, block.use = False, False, block.use + 1
            array = np.frombuffer(block.pages, np.uint8, num_bytes)
            self._at[array.ctypes.data] = (block, block.use)
            weakref.finalize(array, self._dropped, array.ctypes.data, block, block.use).atexit = False
        return torch.from_numpy(array)

    def _take(self, num_bytes: int) -> _Block | None:
        """Return the smallest free block that is large enough, else the largest free one, grown, else a new one."""
        free = sorted((block for block in self._blocks if block.is_free), key=lambda block: block.size)
        block = next((block for block in free if block.size >= num_bytes), free[-1] if free else None)
        if block is not None and block.size >= num_bytes:
            return block
        size = -(-num_bytes // _STEP) * _STEP
        descriptor = os.memfd_create("vlm-stream") if block is None else block.descriptor
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, when it can be refused: a page that is missing later kills
            pages = mmap.mmap(descriptor, size)
        except OSError:
            if block is None:
                os.close(descriptor)
            return None
        if block is None:
            block = _Block(len(self._blocks), descriptor, size, pages)
            self._blocks.append(block)
        else:
            block.size, block.pages = size, pages
        return block

    def _dropped(self, address: int, block: _Block, use: int) -> None:
        """Take back a block whose tensor was dropped without being sent. No lock: the garbage collector calls this."""
        if self._at.get(address) == (block, use):  # else the address is that of a later use
            del self._at[address]
        if block.use == use and not block.is_sent:
            block.is_free = True

    def reduce(self, tensor: torch.Tensor) -> Any:
        """Pickle a tensor: by its place if it lies in a block, else as torch does."""
        from torch.multiprocessing.reductions import reduce_tensor

        if tensor.device.type == "cpu" and not tensor.requires_grad and type(tensor) is torch.Tensor:
            with self._lock:
                block, use = self._at.get(tensor.untyped_storage().data_ptr(), (None, 0))
                if block is not None and block.use == use and not block.is_free:
                    block.is_sent = True
                    form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
                    return _rebuild, (os.getpid(), block.number, block.descriptor, block.size, form)
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


_pool: _Pool | None = None
_readers: dict[int, BlockReader] = {}


def offer_blocks(returned: Any) -> None:
    """Let this worker send tensors in blocks, once the parent has said through `returned` that it can read them."""
    global _pool
    _pool = _Pool(returned)
    ForkingPickler.register(torch.Tensor, _pool.reduce)


def allocate_block(num_bytes: int) -> torch.Tensor | None:
    """Return a tensor of bytes, of any values, in a block; None in processes that offer none."""
    return None if _pool is None or not num_bytes else _pool.allocate(num_bytes)


class BlockReader:
    """The parent's side: reads the blocks of one worker and gives them back."""

    def __init__(self, pid: int, returned: Any) -> None:
        """Look whether the worker's blocks can be opened, and tell it."""
        self._pid = pid
        self._returned = returned
        self._pages: dict[int, mmap.mmap] = {}
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._dropped: deque[int] = deque()
        _readers[pid] = self
        if hasattr(os, "memfd_create") and _can_look_into(pid):
            returned.put(None)

    def give_back(self) -> None:
        """Send the worker the blocks of which the last tensor was dropped.

        Not done by whoever drops it: that may be the garbage collector, in the middle of anything.
        """
        while self._dropped:
            self._returned.put(self._dropped.popleft())

    def close(self) -> None:
        """Let go of the worker; tensors that are still in use keep their memory."""
        _readers.pop(self._pid, None)
        self._pages.clear()

    def read(self, number: int, descriptor: int, size: int) -> Any:
        """Return a block's bytes."""
        known = self._arrays.get(number)
        array = known() if known is not None else None
        if array is not None:  # several tensors of a batch may lie in one block
            return array
        pages = self._pages.get(number)
        if pages is None or len(pages) < size:
            opened = os.open(f"/proc/{self._pid}/fd/{descriptor}", os.O_RDWR)
            try:
                pages = self._pages[number] = mmap.mmap(opened, size)
            finally:
                os.close(opened)
        array = np.frombuffer(pages, np.uint8, size)
        self._arrays[number] = weakref.ref(array)
        weakref.finalize(array, self._dropped.append, number).atexit = False
        return array


def _can_look_into(pid: int) -> bool:
    """Tell whether the files that a process has open may be opened here."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        return any(entry.readlink() for entry in folder.iterdir())
    except OSError:
        return False


def _rebuild(pid: int, number: int, descriptor: int, size: int, form: tuple[Any, ...]) -> torch.Tensor:
    dtype, shape, stride, offset = form
    reader = _readers.get(pid)
    if reader is None:
        raise RuntimeError(f"worker {pid} is not one of this process, so its tensors cannot be read")
    return torch.from_numpy(reader.read(number, descriptor, size)).view(dtype).as_strided(shape, stride, offset)
