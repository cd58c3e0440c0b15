"""Without a processor: the same plan, the samples as they lie in the tars."""

import json
import shutil
import tarfile

import pytest
from torch.utils.data import DataLoader

from vlm_stream import RawSample, StreamLoader, StreamOptions, VLMStream
from vlm_stream.errors import ConfigError


def tar_contents(shards):
    """Every sample of the tars, read with tarfile: {(tar, key): {member: bytes}}."""
    found = {}
    for path in sorted(shards.glob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                key, name = info.name.split(".", 1)
                found.setdefault((path.name, key), {})[name] = tar.extractfile(info).read()
    return found


def samples_of(batches):
    return [sample for batch in batches for sample in batch["samples"]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once_with_its_bytes(toy_shards, num_workers):
    loader = StreamLoader(toy_shards, processor=None, mode="plain", batch_size=4, num_workers=num_workers)
    samples = samples_of(loader)
    delivered = {(s.shard, s.key): {name: bytes(view) for name, view in s.members.items()} for s in samples}
    assert len(samples) == len(delivered)
    assert delivered == tar_contents(toy_shards)
    messages = samples[0].conversation()
    assert {message["role"] for message in messages} >= {"user", "assistant"}


@pytest.mark.parametrize("index_bytes", [0, "20k"])
def test_indexes_that_are_kept_stay_within_their_limit(toy_shards, index_bytes):
    stream = VLMStream(toy_shards, processor=None, mode="plain", batch_size=4, index_bytes=index_bytes)
    samples = [(s.shard, s.key) for s in samples_of(stream)]
    kept = stream.plan().datasets.opened[0]._cache
    assert (
        kept.num_bytes <= (20_000 if index_bytes else 0) < sum(p.stat().st_size for p in toy_shards.glob("*.parquet"))
    )
    assert samples == [(s.shard, s.key) for s in samples_of(VLMStream(toy_shards, processor=None, mode="plain"))]


def test_packs_hold_the_samples_that_an_encoded_run_packs(toy_shards, processor):
    options = {"mode": "packed", "pack_size": 1024, "batch_size": 2, "window": 32}
    raw = StreamLoader(toy_shards, processor=None, **options)
    encoded = StreamLoader(toy_shards, processor=processor, with_refs=True, **options)
    names = [[[(s.source, s.shard, s.key, s.entry, s.id) for s in row] for row in batch["samples"]] for batch in raw]
    assert names == [[[tuple(name) for name in row] for row in batch["refs"]] for batch in encoded]
    assert raw.metrics()["tokens"] == encoded.metrics()["tokens"]


def test_resume_is_exact(toy_shards):
    options = {"processor": None, "mode": "plain", "batch_size": 7}
    loader = StreamLoader(toy_shards, **options)
    batches, states = [], []
    for batch in loader:
        batches.append([sample.key for sample in batch["samples"]])
        states.append(json.dumps(loader.state_dict()))
    for position, state in enumerate(states):
        resumed = StreamLoader(toy_shards, **options)
        resumed.load_state_dict(json.loads(state))
        assert [[s.key for s in batch["samples"]] for batch in resumed] == batches[position + 1 :]


def test_a_function_of_the_users_encodes_in_the_worker(toy_shards):
    def lengths(rows, processor):
        assert processor is None
        return {"bytes": [sum(map(len, sample.members.values())) for sample in rows]}

    loader = StreamLoader(
        toy_shards,
        processor=None,
        mode="plain",
        batch_size=4,
        collate_fn=lengths,
        num_workers=1,
        start_method="fork",
        shuffle=False,
    )
    expected = [sum(map(len, members.values())) for members in tar_contents(toy_shards).values()]
    assert [size for batch in loader for size in batch["bytes"]] == expected


def test_a_damaged_sample_is_left_out_and_named(toy_shards, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(toy_shards, folder)
    tar = min(folder.glob("*.tar"))
    content = bytearray(tar.read_bytes())
    content[600] ^= 1
    tar.write_bytes(content)
    loader = StreamLoader(folder, processor=None, mode="plain", batch_size=4, bad_budget=None)
    delivered = {(sample.shard, sample.key) for sample in samples_of(loader)}
    (missing,) = tar_contents(toy_shards).keys() - delivered
    assert [(line.shard, line.sample, line.reason) for line in loader.ledger.newest] == [(*missing, "crc_mismatch")]


def test_a_sample_survives_pickling_as_bytes(toy_shards):
    import pickle

    (sample,) = next(iter(StreamLoader(toy_shards, processor=None, mode="plain")))["samples"]
    copied = pickle.loads(pickle.dumps(sample))
    assert isinstance(copied, RawSample)
    assert all(isinstance(content, bytes) for content in copied.members.values())
    assert {name: bytes(view) for name, view in sample.members.items()} == copied.members


@pytest.mark.parametrize("options", [{"pp_microbatches": 2}, {"pixels": "compact"}, {"pixels": False}])
def test_what_only_encoded_batches_have_is_refused(toy_shards, options):
    with pytest.raises(ConfigError, match=r"without a processor batches are bytes, so .* cannot be honoured"):
        next(iter(StreamLoader(toy_shards, processor=None, mode="plain", **options)))


def test_what_a_collate_fn_calls_input_ids_need_not_be_a_tensor(toy_shards):
    def collate(rows, _processor):
        return {"input_ids": [len(row.key) for row in rows]}

    batch = next(iter(StreamLoader(toy_shards, processor=None, mode="plain", batch_size=4, collate_fn=collate)))
    assert batch == {"input_ids": [9] * 4}


def test_a_collate_fn_must_return_a_dict(toy_shards):
    loader = StreamLoader(toy_shards, processor=None, mode="plain", batch_size=4, collate_fn=lambda rows, _: rows)
    with pytest.raises(ConfigError, match="collate_fn returned list, but a batch is a dict"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_loader_leaves_samples_as_they_are(toy_shards, num_workers):
    """It takes tuples and views apart that it finds in a batch."""
    stream = VLMStream(
        str(toy_shards), processor=None, options=StreamOptions(mode="plain", batch_size=4, shuffle=False)
    )
    expected = next(iter(StreamLoader(toy_shards, processor=None, mode="plain", batch_size=4, shuffle=False)))[
        "samples"
    ]
    found = next(iter(DataLoader(stream, batch_size=None, num_workers=num_workers)))["samples"]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, RawSample)
        assert {name: bytes(content) for name, content in one.members.items()} == dict(other.members)
