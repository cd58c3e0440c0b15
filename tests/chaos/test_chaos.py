"""The chaos command: what it must refuse, that its checker sees what is wrong, and a few real faults."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from tests.chaos.__main__ import exit_code, markdown, together
from vlm_stream.chaos import ChaosOptions, Report, Row, run_chaos
from vlm_stream.chaos.checker import Checker, OrderError, digest_of
from vlm_stream.chaos.crew import EndedError, HangError
from vlm_stream.chaos.faults import DATA_KINDS, PROCESS_KINDS
from vlm_stream.chaos.run import choose_kind, may_end
from vlm_stream.chaos.stage import Stage
from vlm_stream.chaos.trainer import Arrival, Failed
from vlm_stream.cli import main
from vlm_stream.errors import ConfigError
from vlm_stream.loader_options import parse_keywords
from vlm_stream.state import RunState
from vlm_stream.stream import VLMStream

OPTIONS = {"processor": None, "mode": "plain", "batch_size": 4, "with_refs": True}


@pytest.fixture
def arguments(toy_shards):
    return {"sources": str(toy_shards), **OPTIONS}


@pytest.fixture
def arrivals(arguments):
    """What a good trainer of one rank tells."""
    stream = VLMStream(**arguments, rank=0, world_size=1)
    return [
        Arrival(
            delivery.name,
            [[tuple(name[:3]) for name in row] for row in delivery.batch["refs"]],
            [],
            digest_of(delivery.batch),
            [],
        )
        for _, delivery in stream.deliveries()
    ]


@pytest.fixture
def checker(arguments):
    checker = Checker(arguments)
    checker.begin(1, RunState())
    yield checker
    checker.close()


def test_a_recipe_with_a_device_is_compared_before_any_device(arguments, tmp_path):
    stage = Stage({**arguments, "device": "cpu", "dtype": "bfloat16", "num_workers": 1}, tmp_path)
    told = [
        parse_keywords(None, {k: v for k, v in each.items() if k not in ("sources", "processor")})
        for each in (stage.arguments, stage.planned)
    ]
    assert [loader.device for _, loader in told] == [None, None]
    assert told[0][0].pixels == told[1][0].pixels == "full"


def check(checker, arrival):
    return checker.check(0, arrival, compares=True, damaged=False)


def counts(found):
    return found.named, found.lost, found.repeated, found.silent


def test_what_was_planned_passes(checker, arrivals):
    for arrival in arrivals:
        assert counts(check(checker, arrival)) == (0, 0, 0, 0)
    assert checker.expects_end(0)
    assert counts(checker.end_round(RunState(rounds=1))) == (0, 0, 0, 0)


def test_a_sample_that_is_missing_without_a_word_is_silent(checker, arrivals):
    found = check(checker, arrivals[0]._replace(rows=arrivals[0].rows[1:]))
    assert counts(found) == (0, 0, 0, 1)
    assert str(arrivals[0].rows[0][0]) in found.notes[0]


def test_a_sample_in_the_ledger_is_named(checker, arrivals):
    first = arrivals[0]
    found = check(checker, first._replace(rows=first.rows[1:], bad=[(first.rows[0][0], "decode: bad_image")]))
    assert counts(found) == (1, 0, 0, 0)
    assert "left out, decode: bad_image" in found.notes[0]  # though nothing had damaged it


def test_a_strange_sample_and_other_bytes_are_seen(checker, arrivals):
    strange = arrivals[0]._replace(rows=[*arrivals[0].rows, arrivals[1].rows[0]])
    assert counts(check(checker, strange)) == (0, 0, 1, 0)
    found = check(checker, arrivals[1]._replace(digest="0"))
    assert counts(found) == (0, 0, 0, 4)
    assert "its bytes are not those of the data" in found.notes[0]


@pytest.mark.parametrize("wrong", [lambda came: came[1], lambda came: came[0]._replace(name=came[1].name)])
def test_a_batch_out_of_its_turn_is_an_error(checker, arrivals, wrong):
    with pytest.raises(OrderError, match=r"rank 0 was given BatchName.*step=1.*where the plan has BatchName.*step=0"):
        check(checker, wrong(arrivals))


def test_what_came_behind_a_checkpoint_does_not_count_after_a_resume(arguments, arrivals):
    """Nothing is saved, and a part comes again: as after a real resume. Then the same with a state that is wrong."""
    checker = Checker(arguments)
    for _ in range(2):
        checker.begin(1, RunState())
        for arrival in arrivals[:3]:
            check(checker, arrival)
    for arrival in arrivals[3:]:
        check(checker, arrival)
    assert counts(checker.end_round(RunState(rounds=1))) == (0, 0, 0, 0)
    checker.close()
    checker = Checker(arguments)
    checker.begin(1, RunState())
    for arrival in arrivals[:3]:
        check(checker, arrival)
    checker.saved()
    checker.begin(1, RunState())  # of the beginning, where the trainer should have gone on behind the third batch
    for arrival in arrivals:
        check(checker, arrival)
    found = checker.end_round(RunState(rounds=1))
    assert (found.lost, found.repeated) == (0, 12)
    checker.close()


def test_the_stage_copies_what_will_be_damaged(arguments, toy_shards, tmp_path):
    before = {path.name: path.read_bytes() for path in toy_shards.iterdir() if path.is_file()}
    with Stage(arguments | {"num_workers": 2}, tmp_path) as stage:
        assert len(stage.shards) == 6
        for copy in stage.shards:
            assert copy.path.is_relative_to(tmp_path)
            copy.path.write_bytes(b"")
        assert stage.arguments["sources"]["data"]["url"].startswith(str(tmp_path))
        assert stage.planned["sources"]["data"]["url"] == str(toy_shards)
    assert {path.name: path.read_bytes() for path in toy_shards.iterdir() if path.is_file()} == before


EVERY_KIND = [kind for kinds in (*PROCESS_KINDS.values(), *DATA_KINDS.values()) for kind in kinds]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.name)
def test_a_run_survives_an_end_only_where_the_fault_itself_ends_it(kind):
    """A trainer that crashes because a builder was killed, or a disk was full, has not survived that."""
    kills = kind.name in ("trainer: kill -9", "trainer: SIGSEGV", "all processes: kill -9") or kind.cuts_state
    assert may_end(kind, EndedError(0, None)) == kills
    sentences = {
        "descriptors: few left": "StorageError",
        "shard: replaced, other length": "ChangedObjectError",
        "server: stale objects": "ChangedObjectError",
        "server: credentials expired": "AccessError",
        "state: cut while it is written": "StateError",
    }
    for name in ("StorageError", "ChangedObjectError", "AccessError", "StateError", "WorkerError", "BadBudgetError"):
        assert may_end(kind, EndedError(0, Failed(name, "", True))) == (sentences.get(kind.name) == name)
        assert not may_end(kind, EndedError(0, Failed(name, "", False)), [name])
        assert may_end(kind, EndedError(0, Failed(name, "", True)), [name])  # of a batch that was built ahead
    assert not may_end(kind, HangError())
    assert not may_end(kind, OrderError())


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_is_drawn_once_before_one_is_drawn_again(seed):
    drawn = [choose_kind(EVERY_KIND, seed, number, random.Random(number)).name for number in range(len(EVERY_KIND))]
    assert sorted(drawn) == sorted(kind.name for kind in EVERY_KIND)
    again = [choose_kind(EVERY_KIND, seed, number, random.Random(number)).name for number in range(len(EVERY_KIND))]
    assert drawn == again
    assert "server: credentials expired" in drawn


def test_tables_of_two_runs_are_added_up():
    one = Report(7, rows=[Row("a", times=3, survived=3, named=1, longest_wait_s=2.0)])
    other = Report(7, rows=[Row("b", times=1, survived=1), Row("a", times=4, survived=3, lost=1, longest_wait_s=5.0)])
    joined = together([one, other])
    assert joined.rows == [
        Row("a", times=7, survived=6, named=1, lost=1, longest_wait_s=5.0),
        Row("b", times=1, survived=1),
    ]
    assert not joined.is_good
    assert markdown(joined).splitlines()[-1] == "| all | 8 | 7 | 0 | 1 | 1 | 0 | 0 | 5.0 |"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"train": False}, "has train=False, and an evaluation has no state"),
        ({"builders": "ray"}, "has builders on Ray, whose machines are not this command's to end"),
        ({}, r"no fault of this recipe begins with nonsense, so nothing would happen; there are: trainer"),
    ],
)
def test_what_cannot_be_disturbed_is_refused(arguments, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_chaos(arguments | more, ChaosOptions(only=("nonsense",)))


def test_real_faults_are_survived_and_the_table_says_so(toy_shards, capsys):
    """One of each of some kinds, in real processes: chosen by seed, so that the test is the same every time."""
    flags = ["--set", "num_workers=2", "--set", "start_method=fork", "--set", "epochs=4", "--mode", "plain"]
    only = ["--only", "builder: kill", "trainer: kill", "shard: cut", "state"]
    code = main(["chaos", str(toy_shards), *flags, *only, "--faults", "8", "--seed", "5", "--minutes", "20", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["notes"]
    assert report["total"]["times"] == report["total"]["survived"] == 8
    assert report["batches"] > 24
    times = Counter({row["fault"]: row["times"] for row in report["rows"]})
    assert times["builder: kill -9"]
    assert times["trainer: kill -9"]


@pytest.mark.parametrize(
    ("numbers", "note", "code"),
    [
        ({"survived": 2}, "", 0),
        ({"survived": 1}, "fault 1 (shard): EndedError: rank 0: ImportError", 3),
        ({"survived": 1}, "fault 1 (shard): OrderError: not the next batch", 1),
        ({"survived": 1}, "fault 1 (shard): HangError: nothing came", 1),
        ({"survived": 1, "lost": 1}, "", 1),
        ({"survived": 2, "silent": 1}, "", 1),
    ],
)
def test_only_an_end_of_a_run_is_worth_another_try(numbers, note, code):
    good = Report(1, rows=[Row("builder", times=1, survived=1)])
    assert exit_code([good, Report(1, rows=[Row("shard", times=2, **numbers)], notes=[note])]) == code
