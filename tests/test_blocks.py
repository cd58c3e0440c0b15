"""Tensors in blocks that are used again: the right values at all times, also for tensors that are kept."""

import os
from pathlib import Path

import pytest
import torch

from tests.dispatch.jobs import Numbers, dispatch
from vlm_stream import blocks
from vlm_stream.collate import join_rows

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="blocks are Linux files without a name")

NUM_ITEMS = 24


def make_item(number):
    """Media of different sizes, joined as collation does; two views of one tensor; a small tensor; a float one."""
    rows = [torch.full((400 + 150 * (number % 5), 700), number, dtype=torch.uint8) for _ in range(4)]
    pixels = join_rows("pixel_values", rows)
    one = join_rows("single", [torch.full((600, 600), number / 2)])
    return {"cursor": number, "halves": torch.tensor_split(pixels, 2), "one": one, "small": torch.tensor([number])}


class Items(Numbers):
    def make(self, number):
        join_rows("dropped", [torch.zeros(1000, 1200)] * 2)  # taken and never sent
        return make_item(number)


def batches_of(config, count=NUM_ITEMS, **options):
    """Yield batches; in the end no process is left. A small limit, so that blocks come back soon."""
    dispatcher = dispatch(config, count, **{"num_workers": 1, "max_bytes": 300, **options})
    try:
        for _ in range(count):
            yield next(dispatcher)[1].batch
    finally:
        dispatcher.close()


def is_right(item):
    number = item["cursor"]
    expected = make_item(number)
    pairs = [*zip(item["halves"], expected["halves"], strict=True), (item["one"], expected["one"])]
    return all(torch.equal(left, right) for left, right in [*pairs, (item["small"], expected["small"])])


def run(keep, num_workers=2):
    kept, mapped, taken = [], set(), []
    for item in batches_of(Items(), num_workers=num_workers):
        taken.append(item["cursor"])
        assert is_right(item)
        mapped.add(item["halves"][0].untyped_storage().data_ptr())
        kept.append(item)
        if len(kept) > keep:
            kept.pop(0)
        assert all(is_right(each) for each in kept)
    assert taken == list(range(NUM_ITEMS))
    return kept, mapped


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_tensors_keep_their_values_while_somebody_holds_them(keep):
    kept, _ = run(keep)
    assert all(is_right(item) for item in kept)  # also when the workers are gone


def test_blocks_are_used_again():
    _, mapped = run(0, num_workers=1)
    assert len(mapped) < NUM_ITEMS / 2  # those in the queue, in the making and in hand; and blocks that grew


def test_of_words_about_what_was_dropped_one_may_overtake_another():
    pool = blocks.BlockPool()
    pool.is_welcome = True
    tensor = pool.allocate(1 << 20)
    address = tensor.data_ptr()
    for _ in range(2):
        assert pool.place(tensor) is not None
    del tensor
    pool.take_back([(0, 2)])
    pool.take_back([(0, 1)])
    assert pool.allocate(1 << 20).data_ptr() == address
    os.close(pool._blocks[0].descriptor)  # a worker's ends with it


def test_all_kept():
    kept, mapped = run(NUM_ITEMS)
    assert len(mapped) == NUM_ITEMS
    assert [item["cursor"] for item in kept] == list(range(NUM_ITEMS))


def test_without_the_right_to_look_tensors_travel_in_messages(monkeypatch):
    monkeypatch.setattr(blocks, "_open_files", lambda _pid: None)
    kept, _ = run(2)
    assert kept
    assert "memfd:vlm-stream" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("call", "error"), [("posix_fallocate", "No space left on device"), ("memfd_create", "Too many open files")]
)
def test_when_memory_or_files_are_short_tensors_travel_in_messages(monkeypatch, call, error):
    def refuse(*_):
        raise OSError(error)

    monkeypatch.setattr(os, call, refuse)
    kept, _ = run(2)
    assert kept
    assert "memfd:vlm-stream" not in Path("/proc/self/maps").read_text()


def test_nothing_is_left_open_in_the_parent():
    def is_open():
        links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink() and entry.exists()]
        return any("memfd:vlm-stream" in str(link) for link in links)

    kept, _ = run(1)
    assert blocks._readers == {}
    del kept
    assert not is_open()
    assert "memfd:vlm-stream" not in Path("/proc/self/maps").read_text()


class Twice(Numbers):
    """Every third tensor comes again two items later, as with a trainer that asks for the last good batch."""

    def make(self, number):
        value = join_rows("pixel_values", [torch.full((600, 700), number, dtype=torch.uint8)] * 4)
        if number % 3 == 0:
            self.kept = (number, value)
        return {"sent": [(number, value)] + ([self.kept] if number % 3 == 2 else [])}


def test_a_tensor_that_is_sent_again_is_the_same():
    held = []
    for item in batches_of(Twice()):
        held = [*held[-1:], item]
        for each in held:
            for number, tensor in each["sent"]:
                assert (tensor == number).all(), number


class Sparse(Numbers):
    def make(self, number):
        return {"x": torch.eye(3).to_sparse() * number}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_without_a_plain_storage_travel_as_torch_sends_them():
    assert [item["x"].to_dense()[0, 0].item() for item in batches_of(Sparse(), 3)] == [0.0, 1.0, 2.0]


def blocks_mapped():
    return sum("memfd:vlm-stream" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_blocks_beyond_a_few_are_given_up():
    held, counts = [], []
    for item in batches_of(Items()):
        held = [*held, item] if item["cursor"] < 15 else []
        counts.append(blocks_mapped())
        assert is_right(item)
    assert max(counts) >= 30  # two for each item
    assert counts[-1] <= 16 + 2 * 4  # those of items that were on their way may be above the limit


class Tokens(Numbers):
    """Tensors of some kilobytes, as texts have them; one of them is a part of another, with gaps."""

    def make(self, number):
        ids = torch.full((2, 8000), number)
        return {"ids": ids, "strided": (ids + 1)[:, ::2], "half": torch.full((9000,), number).half()}


def are_right(item, number):
    values = {"ids": number, "strided": number + 1, "half": number}
    return all(bool((item[name] == value).all()) for name, value in values.items())


@pytest.mark.parametrize("keep", [0, 30])
def test_tensors_of_middling_size_share_a_block(keep):
    held, mapped = [], set()
    for number, item in enumerate(batches_of(Tokens(), 60)):
        held = [*held, (item, number)][-keep - 1 :]
        assert all(are_right(*each) for each in held)
        mapped.add(blocks_mapped())
        for tensor in item.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # and nobody saves the rest of its block
            assert tensor._base is None
    assert 1 <= max(mapped) <= 2 + keep // 8  # some 15 items have room in each


def test_beyond_a_few_shared_blocks_tensors_travel_in_messages(monkeypatch):
    monkeypatch.setattr(blocks, "_SHARED_BLOCKS", 2)  # what is forked has the same
    held = []
    for number, item in enumerate(batches_of(Tokens(), 60)):
        held.append((item, number))
        assert blocks_mapped() <= 2
    assert all(are_right(*each) for each in held)


class Mapped(Numbers):
    def make(self, number):
        join_rows("pixel_values", [torch.zeros(1000, 1200)] * 2)
        return {"mapped": blocks_mapped()}


def test_a_fork_does_not_keep_the_blocks_of_other_workers():
    outer = batches_of(Items())
    held = [next(outer) for _ in range(10)]
    del held
    assert blocks_mapped() >= 12  # they are kept to be filled again
    inner = batches_of(Mapped(), 4)
    # Its own, those of the items in use, and those that had arrived.
    assert next(inner)["mapped"] <= 3 + 2 * 3
    inner.close()
    outer.close()
