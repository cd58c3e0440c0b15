"""Samples that end their worker: left out behind the second death, named, and nothing else is lost."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import time
from collections import Counter

import pytest
from transformers.models.qwen2_5_vl import processing_qwen2_5_vl

from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.errors import WorkerError

pytestmark = pytest.mark.usefixtures("nothing_is_late")  # deaths are counted

OPTIONS = {"mode": "plain", "batch_size": 3, "with_refs": True, "bad_budget": None, "shuffle": False}


def crash():
    ctypes.string_at(0)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(7)


def hang():
    time.sleep(600)


ACTS = {"CRASH": crash, "ABORT": os.abort, "KILLED": be_killed, "LEAVE": leave, "HANG": hang}


class Qwen2_5_VLProcessor(processing_qwen2_5_vl.Qwen2_5_VLProcessor):  # noqa: N801 - families go by the class's name
    """The real one, except that some words end the process."""

    def __call__(self, text=None, **arguments):
        for word, act in ACTS.items():
            if word in text[0]:
                faulthandler.disable()  # pytest's, which would tell of every death
                act()
        return super().__call__(text=text, **arguments)


@pytest.fixture(scope="module")
def deadly(processor):
    copied = copy.copy(processor)
    copied.__class__ = Qwen2_5_VLProcessor
    return copied


@pytest.fixture(scope="module")
def shards_with(tmp_path_factory, saved_processor):
    """Return a function that writes 30 samples, of which some say a word."""

    def write(words):
        folder = tmp_path_factory.mktemp("shards")
        with (folder / "data.jsonl").open("w") as file:
            for number in range(30):
                turns = [("user", f"What is {number}?"), ("assistant", f"A number. {words.get(number, '')}")]
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
        settings = {"samples_per_shard": 8, "processor": str(saved_processor), "shuffle": False}
        make_shards(folder / "data.jsonl", folder / "out", **settings)
        return folder / "out"

    return write


def refs_of(loader):
    return [batch["refs"] for batch in loader]


def without(refs, keys):
    return [[[name for name in row if name[2] not in keys] for row in batch] for batch in refs]


def run(shards, processor, killers, stream=OPTIONS, **options):
    """Stream, and check that nothing but the killers is missing and that nothing has shifted."""
    expected = refs_of(StreamLoader(shards, processor=harmless(processor), **stream))
    loader = StreamLoader(shards, processor=processor, **stream, **({"num_workers": 2, "max_restarts": 2} | options))
    came = refs_of(loader)
    assert came == without(expected, killers)
    assert Counter(name[2] for batch in came for row in batch for name in row).most_common(1)[0][1] == 1
    assert {line.sample for line in loader.ledger.newest} == set(killers)
    assert loader.ledger.by_reason() == {"decode: killed_worker": len(killers)}
    return {line.sample: line for line in loader.ledger.newest}


def harmless(deadly):
    copied = copy.copy(deadly)
    copied.__class__ = processing_qwen2_5_vl.Qwen2_5_VLProcessor
    return copied


@pytest.mark.parametrize(
    ("word", "said", "deaths"),
    [("CRASH", "SIGSEGV", 2), ("ABORT", "SIGABRT", 2), ("LEAVE", "exit code 7", 2), ("KILLED", "SIGKILL", 3)],
)
def test_a_sample_that_ends_its_worker_is_left_out(shards_with, deadly, caplog, word, said, deaths):
    with caplog.at_level(logging.WARNING, logger="vlm_stream.dispatch.dispatcher"):
        lines = run(shards_with({13: word}), deadly, {"000000013"})
    line = lines["000000013"]
    assert line.stage == "decode"
    assert f"{deaths} workers were lost while they worked on it (the last one died ({said}" in line.detail
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == deaths
    place = rf"while it worked on row \d of shard {int(line.shard[6:12])} of source 0"
    assert all(re.search(place, message) for message in told)
    assert "without that sample (restart 0 of 2)" in told[-1]


def test_a_sample_on_which_workers_hang_is_left_out(shards_with, deadly):
    lines = run(shards_with({4: "HANG"}), deadly, {"000000004"}, worker_timeout=10.0, max_restarts=20)
    assert "2 workers were lost while they worked on it (the last one hung), so it is left" in lines["000000004"].detail


def test_deaths_by_samples_that_are_left_out_do_not_count_against_the_restarts(shards_with, deadly, caplog):
    killers = {2: "ABORT", 3: "CRASH", 11: "ABORT", 29: "LEAVE"}
    keys = {f"{number:09d}" for number in killers}
    with caplog.at_level(logging.WARNING, logger="vlm_stream.dispatch.dispatcher"):
        run(shards_with(killers), deadly, keys, num_workers=1, max_restarts=1)
    assert len([record for record in caplog.records if "a new one takes its place" in record.getMessage()]) == 8


def test_packed_rows_lose_nothing_else(shards_with, deadly):
    packed = {"pack_size": 120, "with_refs": True, "bad_budget": None}
    run(shards_with({0: "ABORT", 17: "CRASH"}), deadly, {"000000000", "000000017"}, packed)


def test_with_no_restarts_the_error_names_the_sample(shards_with, deadly):
    loader = StreamLoader(shards_with({13: "ABORT"}), processor=deadly, num_workers=1, max_restarts=0, **OPTIONS)
    with pytest.raises(
        WorkerError, match=r"died \(SIGABRT\) while it worked on row \d of shard \d of source 0, after 0"
    ):
        list(loader)


def test_a_resumed_run_leaves_it_out_again(shards_with, deadly):
    shards = shards_with({20: "ABORT"})
    loader = StreamLoader(shards, processor=deadly, num_workers=1, **OPTIONS)
    batches = iter(loader)
    first = [next(batches)["refs"] for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = StreamLoader(shards, processor=deadly, num_workers=2, **OPTIONS)
    resumed.load_state_dict(state)
    came = first + refs_of(resumed)
    expected = refs_of(StreamLoader(shards, processor=harmless(deadly), **OPTIONS))
    assert came == without(expected, {"000000020"})
