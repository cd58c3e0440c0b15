"""Workers that are confined: what a decoder should not do costs its sample, and the run goes on."""

from __future__ import annotations

import copy
import json
import os
import platform
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from transformers.models.qwen2_5_vl import processing_qwen2_5_vl

from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.errors import ConfigError

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="workers are confined on Linux (x86-64)"
)
OPTIONS = {"mode": "plain", "batch_size": 3, "with_refs": True, "bad_budget": None, "shuffle": False}


def connect():
    socket.create_connection(("127.0.0.1", 9), timeout=5)


def connect_in_a_thread():
    found = []

    def run():
        try:
            socket.socket()
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]


def talk_to_itself():
    socket.socketpair()


def start_a_program():
    subprocess.run([sys.executable, "-c", "print(1)"], check=True)


def fork():
    if not os.fork():
        os._exit(0)


def replace_itself():
    os.execv(sys.executable, [sys.executable, "-c", "print(1)"])


def kill_another():
    os.kill(int(os.environ["VLM_STREAM_TEST_OTHER"]), 9)


def take_memory():
    np.ones(3 << 30, np.uint8)


ACTS = {
    act.__name__: act
    for act in (
        connect, connect_in_a_thread, talk_to_itself, start_a_program, fork, replace_itself, kill_another,
        take_memory,
    )
}  # fmt: skip


class Qwen2_5_VLProcessor(processing_qwen2_5_vl.Qwen2_5_VLProcessor):  # noqa: N801 - families go by the class's name
    """The real one, except that some words let it do what a decoder should not."""

    def __call__(self, text=None, **arguments):
        for word in text[0].split():
            if word in ACTS:
                ACTS[word]()
        return super().__call__(text=text, **arguments)


@pytest.fixture(scope="module")
def wild(processor):
    copied = copy.copy(processor)
    copied.__class__ = Qwen2_5_VLProcessor
    return copied


@pytest.fixture(scope="module")
def shards(tmp_path_factory, saved_processor):
    """Thirty samples, of which some say what shall be tried."""
    folder = tmp_path_factory.mktemp("shards")
    words = {2 + 3 * number: name for number, name in enumerate(ACTS)}
    with (folder / "data.jsonl").open("w") as file:
        for number in range(30):
            turns = [("user", f"What is {number}?"), ("assistant", f"A number: {words.get(number, '-')} .")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    settings = {"samples_per_shard": 8, "processor": str(saved_processor), "shuffle": False}
    make_shards(folder / "data.jsonl", folder / "out", **settings)
    return folder / "out", {f"{number:09d}": word for number, word in words.items()}


def test_what_a_decoder_should_not_do_costs_its_sample(shards, wild, monkeypatch):
    other = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv("VLM_STREAM_TEST_OTHER", str(other.pid))
    folder, words = shards
    with StreamLoader(folder, processor=wild, num_workers=2, confine=True, worker_memory="2GiB", **OPTIONS) as loader:
        keys = [name[2] for batch in loader for row in batch["refs"] for name in row]
        bad = {line.sample: line.detail for line in loader.ledger.newest}
    assert other.poll() is None
    other.kill()
    other.wait()
    assert sorted([*keys, *bad]) == [f"{number:09d}" for number in range(30)]
    assert {words[key] for key in bad} == set(ACTS)
    for key, detail in bad.items():
        expected = "MemoryError" if words[key] == "take_memory" else "PermissionError"
        assert expected in detail, (words[key], detail)


def test_the_same_batches_come_of_confined_workers(shards, processor):
    folder, _ = shards
    one, other = (
        [batch["input_ids"].tolist() for batch in StreamLoader(folder, processor=processor, **OPTIONS, **options)]
        for options in ({}, {"num_workers": 1, "confine": True})
    )
    assert one == other


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1, "start_method": "fork"}, {"builders": "ray"}],
)
def test_confinement_of_nobody_is_refused(shards, options):
    with pytest.raises(ConfigError, match="confine takes rights away from worker processes"):
        StreamLoader(shards[0], processor=None, confine=True, **OPTIONS, **options)


def test_workers_that_fetch_from_a_store_are_not_confined(shards, s3_server):
    from vlm_stream.storage import open_store

    store = open_store(s3_server.url("confined"), s3_server.options)
    for path in shards[0].iterdir():
        store.put(path.name, path)
    url = s3_server.url("confined")
    loader = StreamLoader(url, processor=None, confine=True, num_workers=1, store=s3_server.options, **OPTIONS)
    with pytest.raises(ConfigError, match="confine takes connections away from workers, and they fetch s3://"):
        next(iter(loader))
