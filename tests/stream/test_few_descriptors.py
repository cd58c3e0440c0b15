"""A process that may open few files reads more slowly, or says so; it takes no sample for a bad one."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from vlm_stream import StreamLoader
from vlm_stream.dispatch.pool import Failure
from vlm_stream.errors import BadSampleError, StorageError, WorkerError, blame_sample
from vlm_stream.storage import open_store


@contextmanager
def few_more_descriptors(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + count, hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_descriptors_left():
    with few_more_descriptors(1):
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            yield held
        finally:
            for each in held:
                os.close(each)


def test_many_shards_of_many_sources_are_read_with_few_descriptors(tmp_path):
    stores = [open_store(str(tmp_path / f"source-{number}")) for number in range(10)]
    for store in stores:
        for shard in range(12):
            store.put(f"{shard}.tar", store.root.encode() + bytes([shard]))
    with few_more_descriptors(20):
        for _ in range(2):
            for shard in range(12):
                for store in stores:
                    found = store.fetch(f"{shard}.tar", 0, 1000).data
                    assert bytes(found) == store.root.encode() + bytes([shard])


def test_no_descriptor_for_the_first_request_is_a_sentence():
    code = (
        "import os, resource\n"
        "from vlm_stream.errors import StorageError\n"
        "from vlm_stream.storage.remote import in_background\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 2, 4096))\n"  # a loop needs three
        "try:\n"
        "    in_background(lambda: None)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "no request to a store could be made" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout


def test_no_descriptor_at_all_is_a_sentence_and_no_bad_sample(tmp_path):
    store = open_store(str(tmp_path))
    store.put("0.tar", b"data")
    with no_descriptors_left():
        with pytest.raises(StorageError, match=r"has as many files open as it may .*ulimit -n"):
            store.fetch("0.tar", 0, 4)
        with pytest.raises(StorageError, match="which says nothing about the data"):
            blame_sample(RuntimeError("a decoder's own words"), "decode", "bad_video", "it cannot be decoded")
    late = ImportError("frame.so: cannot open shared object file: Too many open files")
    with pytest.raises(StorageError, match="which says nothing about the data"):
        blame_sample(late, "decode", "bad_video", "it cannot be decoded")
    assert isinstance(blame_sample(RuntimeError("x"), "decode", "bad_video", "it cannot be decoded"), BadSampleError)


@pytest.mark.parametrize("error", [ImportError("av.so: Too many open files"), OSError(errno.EMFILE, "no more")])
def test_whatever_part_of_a_run_lacks_descriptors_the_sentence_is_one(toy_shards, error):
    def collate(*_):
        raise error

    loader = StreamLoader(str(toy_shards), processor=None, mode="plain", batch_size=2, collate_fn=collate)
    with pytest.raises(StorageError, match=r"a batch could not be made: .*ulimit -n 4096"):
        next(iter(loader))


def test_a_panic_over_descriptors_is_the_same_sentence():
    text = 'PanicException: called `Result::unwrap()`: Os { code: 24, message: "Too many open files" }'
    assert re.search(r"a batch could not be made: .*ulimit -n 4096", str(Failure(None, text).to_error()))
    assert isinstance(Failure(None, text).to_error(), StorageError)
    assert isinstance(Failure(None, "PanicException: no").to_error(), WorkerError)


SCRIPT = """
import json, resource, sys
import torch, transformers
from vlm_stream import StreamLoader
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sources = {f"copy-{number}": sys.argv[2] for number in range(8)}
loader = StreamLoader(sources, processor=sys.argv[3], mode="plain", batch_size=8, num_workers=int(sys.argv[4]))
print(json.dumps([sum(1 for _ in loader), loader.ledger.to_dict()]))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_videos_are_no_holes_where_descriptors_are_few(toy_shards, saved_processor, num_workers):
    arguments = ["64", str(toy_shards), str(saved_processor), str(num_workers)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=240, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    batches, ledger = json.loads(done.stdout)
    assert batches == 60
    assert ledger["bad"] == 0
