"""Shared memory of a worker process in which large tensors travel to the parent without a copy.

Enters: tensors that a worker sends. Leaves: the same tensors in the parent, in the same memory. A worker owns anonymous
files (memfd); the parent maps them by way of `/proc`. (A builder on Ray is a worker too, and a trainer on its machine
the parent, in all that is said here.) A block is filled again once the parent has dropped all tensors in it, which it
says in its next message. Tensors of middling size, as tokens are, share a block. Where that cannot be done (not Linux,
no right to look at the worker, no memory left), tensors travel in the messages themselves, as small ones always do.
Nothing goes through the shared memory of torch, whose segments have names and stay when a process is killed.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

_MIN_BYTES: Final = 1 << 20
_SENT_BYTES: Final = 1 << 14  # below this a tensor is part of its message
_LARGE_BYTES: Final = 1 << 20  # from here on a tensor has a block of its own
_KEPT_BLOCKS: Final = 16
_SHARED_BYTES: Final = 1 << 22
_SHARED_BLOCKS: Final = 8
"""Blocks that several tensors share, with numbers below 0. There are never more: deep queues of small batches would
take a descriptor for every few of them."""
_ALIGNMENT: Final = 64
_MAPPING: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""All pages at once: asked for one by one, by faults, they take several times as long."""


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    descriptor: int
    size: int
    pages: mmap.mmap
    is_held: bool = False  # a tensor in it is alive in the worker
    num_sent: int = 0  # how many times a tensor in it was sent, ever
    num_dropped: int = 0  # how many of these the parent has dropped: once all are, it says the number of the last

    @property
    def is_free(self) -> bool:
        """Tell whether nobody looks at it."""
        return not self.is_held and self.num_sent == self.num_dropped


class BlockPool:
    """The blocks of a worker."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._num_made = 0
        self._at: dict[int, _Block] = {}  # blocks that are held, by address
        self._shared: torch.Tensor | None = None  # the block that is being filled with several tensors
        self._num_filled = 0  # bytes of it
        self.is_welcome = False  # whether the parent can read blocks

    def take_back(self, returned: Iterable[tuple[int, int]]) -> None:
        """Note blocks that the parent has dropped: the number of each, and of the last tensor in it that was sent."""
        for number, num_dropped in returned:
            block = self._blocks[number]
            block.num_dropped = max(block.num_dropped, num_dropped)  # of messages, one may overtake another

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return bytes of a block; None where the parent cannot read blocks, or memory is short."""
        return self._hold(self._take(num_bytes), num_bytes) if self.is_welcome else None

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy in a block; None where there is no room."""
        num_bytes = tensor.nbytes
        memory = self.allocate(num_bytes) if num_bytes >= _LARGE_BYTES else self._share(num_bytes)
        return None if memory is None else memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _share(self, num_bytes: int) -> torch.Tensor | None:
        """Return bytes of a block that others share; None also where all of these are in use."""
        begin = -(-self._num_filled // _ALIGNMENT) * _ALIGNMENT
        if self._shared is None or begin + num_bytes > _SHARED_BYTES:
            self._shared, begin = None, 0  # let go first
            self._shared = self._hold(self._take_shared(), _SHARED_BYTES) if self.is_welcome else None
        if self._shared is None:
            return None
        self._num_filled = begin + num_bytes
        return self._shared[begin : self._num_filled]

    def _hold(self, block: _Block | None, num_bytes: int) -> torch.Tensor | None:
        """Return the memory of a block, which is held until the last tensor in it is dropped."""
        if block is None:
            return None
        block.is_held = True
        array = np.frombuffer(block.pages, np.uint8, num_bytes)
        self._at[array.ctypes.data] = block
        weakref.finalize(array, self._let_go, array.ctypes.data, block).atexit = False
        return torch.from_numpy(array)

    def _take_shared(self) -> _Block | None:
        """Return a free block to be shared, else a new one, as long as these are few."""
        for number in range(-1, -_SHARED_BLOCKS - 1, -1):
            block = self._blocks.get(number)
            if block is None:
                return self._make(number, _SHARED_BYTES)
            if block.is_free:
                return block
        return None

    def _take(self, num_bytes: int) -> _Block | None:
        """Return the smallest free block that is large enough, else the largest free one, grown, else a new one."""
        own = (block for block in self._blocks.values() if block.number >= 0 and block.is_free)
        free = sorted(own, key=lambda block: block.size)
        for surplus in [block for block in free if block.number >= _KEPT_BLOCKS]:
            free.remove(surplus)
            os.close(surplus.descriptor)
            del self._blocks[surplus.number]
        block = next((block for block in free if block.size >= num_bytes), free[-1] if free else None)
        if block is not None and block.size >= num_bytes:
            return block
        size = _rounded(num_bytes)
        if block is None:
            block = self._make(self._num_made, size)
            self._num_made += block is not None
            return block
        try:
            block.pages = _map_whole(block.descriptor, size)
        except OSError:
            return None
        block.size = size
        return block

    def _make(self, number: int, size: int) -> _Block | None:
        descriptor = None
        try:
            descriptor = os.memfd_create("vlm-stream")
            block = self._blocks[number] = _Block(number, descriptor, size, _map_whole(descriptor, size))
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            return None
        return block

    def _let_go(self, address: int, block: _Block) -> None:
        """Note that the worker has dropped its tensor; the garbage collector calls this, at any moment."""
        del self._at[address]
        block.is_held = False

    def reduce(self, tensor: torch.Tensor) -> Any:
        """Pickle a tensor: by its place in a block, or its bytes if it is small; others as torch saves them."""
        if (saved := save_odd(tensor)) is not None:
            return load_odd, (saved,)
        place = self.place(tensor)
        if place is None and tensor.nbytes >= _SENT_BYTES and (copy := self._copy(tensor)) is not None:
            place = self.place(copy)
        return place or (from_bytes, (flat_bytes(tensor).tobytes(), tensor.dtype, tuple(tensor.shape)))

    def place(self, tensor: torch.Tensor) -> Any:
        """Return how a plain tensor that lies in a block is pickled, by its place; None if it lies elsewhere."""
        block = self._at.get(tensor.untyped_storage().data_ptr()) if tensor.nbytes else None
        if block is None:
            return None
        block.num_sent += 1
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        place = (block.number, block.num_sent, block.descriptor, block.size)
        return _rebuild, (os.getpid(), place, form)


def _map_whole(descriptor: int, size: int) -> mmap.mmap:
    os.posix_fallocate(descriptor, 0, size)  # now, when it can be refused: a page that is missing later kills
    return mmap.mmap(descriptor, size, flags=_MAPPING)


def _rounded(num_bytes: int) -> int:
    """Return a size that is at most a quarter larger: few sizes, so that blocks seldom have to grow."""
    step = max(_MIN_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


_pool: BlockPool | None = None
_readers: dict[int, BlockReader] = {}


def offer_blocks() -> BlockPool:
    """Let this worker send tensors in blocks."""
    global _pool
    for reader in list(_readers.values()):
        reader.close()  # inherited by a fork: the memory of other workers would live as long as this one
    _pool = BlockPool()
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _pool.reduce)
    return _pool


def allocate_block(num_bytes: int) -> torch.Tensor | None:
    """Return a tensor of bytes, of any values, in a block if one can be had; None in processes that offer none."""
    if _pool is None or not num_bytes:
        return None
    block = _pool.allocate(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8) if block is None else block


class BlockReader:
    """The parent's side: reads the blocks of one worker and gives them back."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files = _open_files(pid) if hasattr(os, "memfd_create") else None
        self._pages: dict[int, mmap.mmap] = {}
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._num_sent: dict[int, int] = {}
        """Of each block that is to be given back, how many tensors in it were sent, up to the last that came."""
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()  # between the threads that read from the worker and write to it
        _readers[pid] = self

    @property
    def can_read(self) -> bool:
        """Tell whether the worker may send tensors in blocks."""
        return self._files is not None

    def to_return(self) -> list[tuple[int, int]]:
        """Return the blocks of which the last tensor was dropped, for the worker.

        Not sent by whoever drops it: that may be the garbage collector, in the middle of anything.
        """
        returned = []
        with self._lock:
            while self._dropped:
                number = self._dropped.popleft()
                if self._arrays[number]() is not None or number not in self._num_sent:
                    continue  # another tensor in it has come meanwhile, or has come and gone and was told already
                if number >= _KEPT_BLOCKS:
                    self._pages.pop(number, None)
                returned.append((number, self._num_sent.pop(number)))
        return returned

    def close(self) -> None:
        """Let go of the worker; tensors that are still in use keep their memory."""
        _readers.pop(self._pid, None)
        self._pages.clear()
        files, self._files = self._files, None
        if files is not None:
            os.close(files)

    def read(self, number: int, num_sent: int, descriptor: int, size: int) -> Any:
        """Return a block's bytes."""
        with self._lock:
            self._num_sent[number] = num_sent
            known = self._arrays.get(number)
            array = known() if known is not None else None
            if array is not None:  # several tensors of a batch may lie in one block
                return array
            pages = self._pages.get(number)
            if pages is None or len(pages) < size:
                if self._files is None:
                    raise ProcessLookupError("it was let go")
                opened = os.open(str(descriptor), os.O_RDWR, dir_fd=self._files)
                try:
                    pages = self._pages[number] = mmap.mmap(opened, size, flags=_MAPPING)
                finally:
                    os.close(opened)
            array = np.frombuffer(pages, np.uint8, size)
            self._arrays[number] = weakref.ref(array)
            weakref.finalize(array, self._dropped.append, number).atexit = False
            return array


def find_realm() -> str | None:
    """Return a name that two processes have in common where a process id means the same to both; None: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def look_into(pid: int, realm: str | None) -> BlockReader | None:
    """Return a reader of a process that is no child of this one; None where its blocks cannot be read here."""
    if realm is None or realm != find_realm():
        return None
    reader = BlockReader(pid)
    if reader.can_read:
        return reader
    reader.close()
    return None


def _open_files(pid: int) -> int | None:
    """Open the folder of the files that a process has open; None where these may not be opened here.

    When the process has ended there is nothing in it, whoever has its process id then.
    """
    try:
        entry = next(Path(f"/proc/{pid}/fd").iterdir())
        entry.stat()  # follows the link, which asks for the same right as opening does
        return os.open(entry.parent, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, StopIteration):
        return None


def save_odd(tensor: torch.Tensor) -> bytes | None:
    """Return a tensor as torch saves it, if it is more than its bytes, type and shape; else None."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and tensor.device.type == "cpu" and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return None
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def load_odd(data: bytes) -> torch.Tensor:
    """Return what was saved."""
    tensor: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return tensor


def flat_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor, which share its memory if they are in a row."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def from_bytes(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that has these bytes: a copy of them, or over memory that may be written."""
    if isinstance(data, bytes):
        data = bytearray(data)
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _rebuild(pid: int, place: tuple[int, int, int, int], form: tuple[Any, ...]) -> torch.Tensor:
    dtype, shape, stride, offset = form
    reader = _readers.get(pid)
    if reader is None:
        raise RuntimeError(f"worker {pid} is not one of this process, so its tensors cannot be read")
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Only its own part of a block, so that nothing saves or sends the rest with it; and no view of another tensor.
    flat = torch.frombuffer(reader.read(*place), dtype=dtype, count=count, offset=offset * dtype.itemsize)
    return flat.as_strided_(shape, stride)
