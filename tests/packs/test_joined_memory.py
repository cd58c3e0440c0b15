"""Large media are joined where the parent can map them; values are the same in any process."""

import multiprocessing

import pytest
import torch

from vlm_stream.packs.media import join_rows


def _join(results, rows):
    joined = join_rows("pixel_values", rows)
    results.put((joined.is_shared(), joined))  # then it must live until the parent has it
    _wait.wait(30)


_wait = multiprocessing.get_context("fork").Event()


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize(("shapes", "is_large"), [(((900, 400), (100, 400)), True), (((2, 3), (1, 3)), False)])
def test_workers_join_large_media_in_shared_memory(daemon, shapes, is_large):
    context = torch.multiprocessing.get_context("fork")
    rows = [torch.randn(shape) for shape in shapes]
    results = context.SimpleQueue()
    _wait.clear()
    process = context.Process(target=_join, args=(results, rows), daemon=daemon)
    process.start()
    try:
        was_shared, joined = results.get()
        assert torch.equal(joined, torch.cat(rows))
        assert was_shared == (daemon and is_large)
    finally:
        _wait.set()
        process.join()


def test_rows_of_different_size_end_with_zeros_in_shared_memory_too():
    context = torch.multiprocessing.get_context("fork")
    rows = [torch.ones(1, 600, 600), torch.ones(1, 300, 700)]
    results = context.SimpleQueue()
    _wait.clear()
    process = context.Process(target=_join, args=(results, rows), daemon=True)
    process.start()
    try:
        was_shared, joined = results.get()
        assert was_shared
        assert torch.equal(joined, join_rows("pixel_values", rows))
    finally:
        _wait.set()
        process.join()
