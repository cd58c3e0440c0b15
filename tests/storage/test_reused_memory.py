"""Memory is filled again when nobody looks at it, and never before."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.storage import open_store
from vlm_stream.storage.reused_memory import ReusedMemory

KB = 1024


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


@given(st.lists(st.tuples(st.integers(64 * KB, 300 * KB), st.integers(0, 5)), max_size=40))
def test_what_somebody_holds_is_never_written_to(steps):
    memory = ReusedMemory(1024 * KB)
    held: list[tuple[memoryview, int]] = []
    for number, (size, num_kept) in enumerate(steps):
        view = memory.take(size)
        assert len(view) == size
        view[:] = bytes([number]) * size
        held.append((view[1:-1].toreadonly(), number))  # a part is enough to hold it
        del view
        held = held[-num_kept:] if num_kept else []
        for part, value in held:
            assert part[0] == part[-1] == part[len(part) // 2] == value


def test_what_nobody_holds_is_used_again():
    memory = ReusedMemory(1024 * KB)
    first = memory.take(100 * KB)
    at = address(first)
    second = memory.take(90 * KB)
    assert address(second) != at
    del first
    assert address(memory.take(120 * KB)) == at


def test_small_and_huge_sizes_are_left_to_the_allocator():
    memory = ReusedMemory(1024 * KB)
    assert memory.take(64 * KB - 1) is None
    assert memory.take(1024 * KB + 1) is None
    assert len(memory.take(1024 * KB)) == 1024 * KB


def test_the_limit_holds_whatever_lengths_come():
    memory = ReusedMemory(1024 * KB)
    for size in (100, 200, 300, 600, 900, 100, 700) * 5:
        memory.take(size * KB)
        blocks = [block for blocks in memory._blocks.values() for block in blocks]
        assert sum(len(block.memory) for block in blocks) <= 1024 * KB + 4 * KB * len(blocks)


def test_what_came_back_last_is_filled_first():
    memory = ReusedMemory(4096 * KB)
    held = [memory.take(100 * KB) for _ in range(4)]
    newest, oldest = address(held[2]), address(held[1])
    del held[1:3]
    again = memory.take(100 * KB)
    assert address(again) == newest
    assert address(memory.take(100 * KB)) == oldest


@pytest.mark.parametrize("num_held", [1, 40])
def test_what_is_held_for_long_does_not_keep_others_from_being_used_again(num_held):
    memory = ReusedMemory(16384 * KB)
    held = [memory.take(100 * KB) for _ in range(num_held)]
    for _ in range(20):
        memory.take(100 * KB)
    assert sum(map(len, memory._blocks.values())) == num_held + 1
    held.append(memory.take(100 * KB))
    del held[0]  # the oldest, behind more that are held than are looked at
    assert memory.take(100 * KB) is not None
    assert sum(map(len, memory._blocks.values())) == num_held + 1


def test_threads_never_share_a_block():
    memory, wrong = ReusedMemory(4096 * KB), []

    def work(value: int) -> None:
        for _ in range(300):
            view = memory.take(70 * KB)
            view[:] = bytes([value]) * len(view)
            if bytes(view) != bytes([value]) * len(view):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_ranges_of_files_stay_what_they_were(tmp_path):
    data = os.urandom(2_000_000)
    (tmp_path / "x").write_bytes(data)
    store = open_store(str(tmp_path))
    held = [(at, store.fetch("x", at, 200_000).data) for at in range(0, 1_800_000, 50_000)]
    for at, view in held:
        assert view == data[at : at + 200_000]
    with pytest.raises(TypeError, match="read-only"):
        held[0][1][0] = 1
    del held, view
    for at in range(0, 1_800_000, 70_000):
        assert store.fetch("x", at, 200_000).data == data[at : at + 200_000]
    assert store.fetch("x", 1_900_000, 200_000).data == data[1_900_000:]
