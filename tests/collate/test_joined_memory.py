"""Large media are joined where the parent can map them; values are the same in any process."""

import pytest
import torch

from vlm_stream.collate import join_rows


def _join(results, rows, taken):
    joined = join_rows("pixel_values", rows)
    results.put((joined.is_shared(), joined))
    taken.wait(240)  # the tensor must live until the parent has it


def join_elsewhere(rows, *, daemon):
    """Join rows in another process; return whether that was in shared memory, and a copy of the result."""
    context = torch.multiprocessing.get_context("fork")
    results, taken = context.SimpleQueue(), context.Event()
    process = context.Process(target=_join, args=(results, rows, taken), daemon=daemon)
    process.start()
    try:
        was_shared, joined = results.get()
        return was_shared, joined.clone()
    finally:
        taken.set()
        process.join()


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize(("shapes", "is_large"), [(((900, 400), (100, 400)), True), (((2, 3), (1, 3)), False)])
def test_workers_join_large_media_in_shared_memory(daemon, shapes, is_large):
    rows = [torch.randn(shape) for shape in shapes]
    was_shared, joined = join_elsewhere(rows, daemon=daemon)
    assert torch.equal(joined, torch.cat(rows))
    assert was_shared == (daemon and is_large)


def test_rows_of_different_size_end_with_zeros_in_shared_memory_too():
    rows = [torch.ones(1, 600, 600), torch.ones(1, 300, 700)]
    was_shared, joined = join_elsewhere(rows, daemon=True)
    assert was_shared
    assert torch.equal(joined, join_rows("pixel_values", rows))


def test_what_is_joined_already_is_not_copied_again(monkeypatch):
    blocks = [torch.empty(1 << 22, dtype=torch.uint8) for _ in range(2)]  # as in a worker
    monkeypatch.setattr("vlm_stream.collate.media.allocate_block", lambda num_bytes: blocks.pop()[:num_bytes])
    pack = join_rows("pixel_values", [torch.randn(900, 400), torch.randn(100, 400)])
    assert join_rows("pixel_values", [pack]).data_ptr() == pack.data_ptr()
