"""What stands between a new loader and its first batch: as few imports, connections and decoded columns as can be."""

import gc
import subprocess
import sys

import pytest
from vlm_stream.stream.datasets import OpenDatasets

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.plan import Planner
from vlm_stream.storage import SpanReader, engine
from vlm_stream.storage.local import LocalStore
from vlm_stream.stream import StreamOptions, normalise_sources, open_planner


def test_the_first_batch_and_a_resume_import_nothing_heavy(toy_shards, saved_processor):
    code = f"""
import sys
from transformers import AutoProcessor
from vlm_stream import StreamLoader
processor = AutoProcessor.from_pretrained({str(saved_processor)!r})
before = set(sys.modules)
loader = StreamLoader({str(toy_shards)!r}, processor=processor, pack_size=1024, window=16)
next(iter(loader))
other = StreamLoader({str(toy_shards)!r}, processor=processor, pack_size=1024, window=16)
other.load_state_dict(loader.state_dict())
next(iter(other))
print(*set(sys.modules) - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {name.partition(".")[0] for name in out.split()} & {"pandas", "pyarrow", "scipy", "datasets"}


def test_a_resume_without_a_processor_imports_no_masked_arrays(toy_shards):
    """They take 18 ms, and the first `np.unique` brings them; with a processor transformers has them already."""
    code = f"""
import sys
from vlm_stream import StreamLoader
loader, other = (StreamLoader({str(toy_shards)!r}, processor=None, pack_size=1024, window=16) for _ in range(2))
batches = iter(loader)
assert "numpy.ma" not in sys.modules
for _ in range(6):
    next(batches)
state = loader.state_dict()
other.load_state_dict(state)
next(iter(other))
print("numpy.ma" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout == "False\n", out.stderr


def test_planning_decodes_no_places(toy_shards, processor):
    options = StreamOptions(pack_size=1024)
    datasets, planner, _ = open_planner(normalise_sources(toy_shards), options, processor)
    step = next(planner.steps(options.shape(1)))
    indexes = [datasets._index(0, shard) for shard in range(len(datasets.manifests[0].shards))]
    assert not any("places" in vars(index) for index in indexes)
    wanted = {ref.shard for row in step.refs(0, 0) for ref in row}
    for row in step.refs(0, 0):
        for ref in row:
            datasets.span(ref)
    assert {number for number, index in enumerate(indexes) if "places" in vars(index)} == wanted


@pytest.mark.parametrize("with_processor", [False, True])
def test_a_run_that_is_left_is_let_go_of_at_once(toy_shards, processor, with_processor):
    """With its indexes and the files that it had open: a circle would keep them until the collector comes by."""

    def leave():
        loader = StreamLoader(toy_shards, processor=processor if with_processor else None, pack_size=1024)
        next(iter(loader))

    leave()
    gc.collect()
    gc.disable()
    try:
        leave()
        left = [one for one in gc.get_objects() if type(one) in (LocalStore, OpenDatasets, Planner, SpanReader)]
        assert not left
    finally:
        gc.enable()


def test_samples_come_over_the_connections_that_brought_the_indexes(toy_shards, processor, monkeypatch):
    def refuse(*_):
        raise AssertionError("the reader opened the store once more")

    monkeypatch.setattr(engine, "open_store", refuse)
    stream = VLMStream(toy_shards, processor=processor, options=StreamOptions(pack_size=1024))
    assert sum(delivery.num_samples for delivery in stream.deliveries()) == 60
