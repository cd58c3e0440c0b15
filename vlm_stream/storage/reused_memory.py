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
_LOOKED_AT: Final = 12


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
        block = _find_free(blocks)
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


def _find_free(blocks: deque[_Block]) -> _Block | None:
    """Take out a block that nobody looks at: of the newest ones the newest, or else the oldest.

    The newest is the warmest: where blocks come back soon, a few of them stay in the processor's cache. Where many are
    held, the one that was given out first is the first to come back. What is looked at is taken out meanwhile, so that
    no two threads find the same one.
    """
    held: list[_Block] = []
    found = None
    try:
        while len(held) < _LOOKED_AT:
            block = blocks.pop()
            if _is_free(block.memory):
                found = block
                break
            held.append(block)
        else:
            block = blocks.popleft()
            if _is_free(block.memory):
                found = block
            else:
                blocks.appendleft(block)
    except IndexError:
        pass  # all are held, or another thread has them in hand
    blocks.extend(reversed(held))
    return found


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
