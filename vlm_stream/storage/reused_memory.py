"""Memory for what is read from disk, filled again once nobody looks at it.

Fresh memory costs more than the copy into it: each page is a fault, and the system fills it with zeros first. Samples
of a few hundred kilobytes are handed out and dropped all the time, so their memory is kept for those that follow.
Whether somebody still looks at it, a `bytearray` knows itself: it refuses to change its length while a view exists.

What is handed out begins with a page. Large memory that the allocator gives begins 16 bytes behind one, and of all
distances between what is copied and where to, some processors (Zen) take three and a half times as long for these.

Any number of threads may take; a process that is forked goes on with memory of its own.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Final, NamedTuple

__all__ = ["ReusedMemory"]

_MIN_BYTES: Final = 64 * 1024
"""Less is soon found by the allocator, whose small blocks stay warm by themselves."""


_PAGE_BYTES: Final = 4096


class _Block(NamedTuple):
    memory: bytearray
    begin: int
    """Of its first whole page."""


class ReusedMemory:
    """Blocks of memory, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        """Begin without any."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: dict[int, deque[_Block]] = {}

    def take(self, size: int) -> memoryview | None:
        """Return writable memory of that size that nobody else has; None where it is not worth it, or does not fit.

        It is taken back by itself when the last view of it is gone.
        """
        if not _MIN_BYTES <= size <= self._max_bytes:
            return None
        length = 1 << (size - 1).bit_length()  # few lengths, so that one of them is soon free
        blocks = self._blocks.setdefault(length, deque())
        try:
            block = blocks.popleft()  # the one that was given out first is the first to come back
        except IndexError:
            block = None
        if block is not None and not _is_free(block.memory):
            blocks.appendleft(block)
            block = None
        if block is None:
            if self._num_bytes + length > self._max_bytes:
                # Of other lengths, or held for long: blocks in use stay alive without us.
                self._blocks, self._num_bytes = {}, 0
                blocks = self._blocks.setdefault(length, deque())
            block = _new_block(length)
            self._num_bytes += length
        view = memoryview(block.memory)[block.begin : block.begin + size]
        blocks.append(block)
        return view


def _new_block(length: int) -> _Block:
    memory = bytearray(length + _PAGE_BYTES)
    return _Block(memory, -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _PAGE_BYTES)


def _is_free(memory: bytearray) -> bool:
    try:
        memory.pop()  # refused while there is a view; otherwise the memory stays where it is
    except BufferError:
        return False
    memory.append(0)
    return True
