"""Conformance finds what is wrong with a trainer, and says where."""

import re

import pytest
import torch

from vlm_stream.errors import ConfigError
from vlm_stream.testing.conformance import CHECKS, ConformanceError, LaunchError, Report, Run, check, launch, make_data
from vlm_stream.testing.conformance.compare import (
    Given,
    compare_batches,
    compare_evaluations,
    compare_gradients,
    compare_numbers,
    compare_ranks,
    own_loop,
)
from vlm_stream.testing.conformance.run import digest, digests

ONCE = {"resume": "not asked here", "world": "not asked here"}
"""One launch is enough."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def problems_of(name, data, folder, **more):
    with pytest.raises(ConformanceError) as caught:
        check(f"tests.testing.wrong_trainers:{name}", folder, data=data, **more)
    parts = re.split(r"\n(\w+) \([^\n]*\):\n", str(caught.value))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


FOUR = {
    "batches": r"rank 0, batch 0, key mm_token_type_ids: missing, expected int64\[1, \d+\]",
    "gradients": r"rank 1: gradients differ from those of one big batch .* wants use_cache=False",
    "length": r"total_steps is 12, expected 6(.|\n)*step 1 of this run: learning rate 0.00091\d+, expected 0.00083",
    "evaluation": r"rank 0: 15 batches in eval mode, expected 2 evaluations of 12",
}
SAME = {
    "batches": r"rank 1, batch \d, key input_ids: this is batch \d+ of rank 0",
    "ranks": r"70 of 70 samples are trained on more than once: .* by ranks \[0, 1\]",
    "length": r"rank 0: length is \d+, expected 12",
    "gradients": "rank 0: gradients differ from those of one big batch",
}


@pytest.mark.trainers
@pytest.mark.parametrize(
    ("name", "expected"), [("four_mistakes", FOUR), pytest.param("same_data_for_all", SAME, marks=pytest.mark.slow)]
)
def test_mistakes_are_found_and_named(data, tmp_path, name, expected):
    found = problems_of(name, data, tmp_path, cannot=ONCE)
    assert set(found) == set(expected)
    for check_name, pattern in expected.items():
        assert re.search(pattern, found[check_name])


@pytest.mark.trainers
@pytest.mark.slow
def test_a_state_that_is_one_batch_late_is_found(data, tmp_path):
    found = problems_of("saves_late", data, tmp_path, cannot={"world": "not asked here"})
    assert set(found) == {"resume", "ranks", "length"}
    assert "resumed: rank 0, batch 4, key input_ids: this is batch 5 of rank 0" in found["resume"]
    assert "resumed: rank 1: 7 batches, expected 8" in found["resume"]
    assert re.search(r"\d+ of 70 samples are never trained on", found["ranks"])


KEYS = {
    "input_ids": "int64[1, 8] 0123456789abcdef",
    "labels": "int64[1, 8] 1123456789abcdef",
    "num_items_in_batch": "5",
}


def make_given(number, *samples, **changes):
    keys = KEYS | {"input_ids": f"int64[1, 8] {number:016x}"} | changes
    return Given(keys, tuple(("data", "shard", name) for name in samples))


WANT = [[make_given(0, "a", "b"), make_given(1, "c")], [make_given(2, "d"), make_given(3)]]
RIGHT = {rank: [given.keys for given in row] for rank, row in enumerate(WANT)}
SAMPLES = {("data", "shard", name) for name in "abcd"}


def test_equal_batches_have_no_problems():
    assert compare_batches(RIGHT, WANT, whole=True) == []
    assert compare_ranks(RIGHT, WANT, SAMPLES) == []
    twice = {rank: rows * 2 for rank, rows in RIGHT.items()}
    assert compare_evaluations(twice, WANT, 2) == []


def changed(rank, place, **changes):
    rows = {one: [dict(keys) for keys in row] for one, row in RIGHT.items()}
    rows[rank][place] = {key: value for key, value in (rows[rank][place] | changes).items() if value is not None}
    return rows


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (changed(1, 0, labels=None), "rank 1, batch 0, key labels: missing, expected int64"),
        (
            changed(1, 0, labels="int64[1, 4] ff"),
            r"rank 1, batch 0, key labels: int64\[1, 4\] ff, expected int64\[1, 8\]",
        ),
        (changed(0, 1, num_items_in_batch="6"), "rank 0, batch 1, key num_items_in_batch: 6, expected 5"),
        (changed(0, 1, more="bool[1] 0123456789abcdef"), "key more: .*, which is not in the batch of our own loop"),
        (
            changed(0, 1, input_ids=RIGHT[1][0]["input_ids"]),
            "rank 0, batch 1, key input_ids: this is batch 0 of rank 1",
        ),
        (changed(0, 1, input_ids="int64[1] 00"), "rank 0, batch 1, key input_ids: .* is in none of our batches"),
        (changed(0, 1, input_ids=None), "rank 0, batch 1, key input_ids: missing"),
        (RIGHT | {0: RIGHT[0][:1]}, "rank 0: 1 batches, expected 2"),
        (RIGHT | {0: RIGHT[0] * 2}, "rank 0: 2 batches more than the 2 of our own loop"),
        (RIGHT | {2: RIGHT[0]}, "rank 2 trained, but there are 2 ranks"),
        ({}, "rank 1: 0 batches, expected 2"),
    ],
)
def test_a_difference_names_rank_batch_and_key(got, problem):
    assert any(re.search(problem, sentence) for sentence in compare_batches(got, WANT, whole=True))


def test_what_trainers_may_change():
    assert compare_batches(changed(0, 1, use_cache="False", num_items_in_batch=None), WANT, whole=True) == []


def test_many_differences_are_counted():
    problems = compare_batches({rank: [{}] * 9 for rank in range(2)}, [[make_given(0, "a")] * 9] * 2, whole=True)
    assert len(problems) == 2 * 5
    assert problems[-1] == "and 5 more differences"


def test_lost_and_repeated_samples_are_named():
    lost, foreign = {0: RIGHT[0]}, {0: [{"input_ids": "x"}]}
    assert compare_ranks(lost, WANT, SAMPLES) == [
        "1 of 4 samples are never trained on: ('data', 'shard', 'd') and so on"
    ]
    assert "rank 0, batch 0: its samples are not known, it is none of our batches" in compare_ranks(
        foreign, WANT, SAMPLES
    )


def test_evaluations_are_compared_one_by_one():
    drifted = {rank: rows + rows[::-1] for rank, rows in RIGHT.items()}
    problems = compare_evaluations(drifted, WANT, 2)
    assert "rank 0, evaluation 1, batch 0, key input_ids: this is batch 1 of rank 0" in problems
    assert "rank 1: 2 batches in eval mode, expected 2 evaluations of 2" in compare_evaluations(RIGHT, WANT, 2)


@pytest.mark.parametrize(
    ("told", "rates", "problem"),
    [
        ({0: {}}, {0: [1.0, 0.5]}, "length was not told"),
        ({0: {"length": 3}}, {0: [1.0, 0.5]}, "rank 0: length is 3, expected 2"),
        ({0: {"length": 2}}, {0: [1.0]}, "rank 0: 1 optimizer steps, expected 2"),
        ({0: {"length": 2}}, {0: [1.0, 1.0]}, "rank 0, step 1 of this run: learning rate 1, expected 0.5"),
        ({0: {"length": 2}}, {}, "no optimizer step was seen"),
    ],
)
def test_numbers_that_are_off_are_named(told, rates, problem):
    problems = compare_numbers(told, rates, expected={"length": 2}, schedule=[1.0, 0.5], whole=True)
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_gradients_that_are_off_are_named():
    want = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    assert compare_gradients({0: want}, want) == []
    assert compare_gradients({0: want | {"b": torch.tensor([4.00000001])}}, want) == []
    [problem] = compare_gradients({1: want | {"b": torch.tensor([2.0])}}, want)
    assert problem.startswith("rank 1: gradients differ from those of one big batch by 5.0e-01 of the largest")
    assert "most in b, where they are about 0.5000 times the right" in problem
    assert compare_gradients({1: {"a": want["a"]}}, want) == ["rank 1: 1 of 2 parameters have no gradient: b"]
    assert "differ" in compare_gradients({0: want | {"b": torch.tensor([torch.nan])}}, want)[0]
    assert compare_gradients({}, want) == ["no optimizer step was seen, so there are no gradients"]


def test_a_digest_is_that_of_the_content():
    one = torch.arange(6).reshape(2, 3)
    assert digest(one) == digest(one.clone())
    assert digest(one.T) == digest(one.T.contiguous())
    assert len({digest(one), digest(one.T), digest(one.int()), digest(one + 1), digest(one.reshape(3, 2))}) == 5
    assert digest(torch.tensor(1.0, dtype=torch.bfloat16)).startswith("bfloat16[] ")
    assert digests({"a": None, "num_items_in_batch": torch.tensor(7)}) == {"num_items_in_batch": "7"}


def test_a_run_survives_its_file(tmp_path):
    run = Run(data=tmp_path, folder=tmp_path / "a", records=tmp_path / "b", save_after=3, options={"seed": 4})
    assert Run.from_file(run.to_file(tmp_path / "run.json")) == run


def test_our_own_loop_is_an_epoch_with_a_step_that_is_not_full(data, tmp_path):
    batches = own_loop(Run(data=data, folder=tmp_path, records=tmp_path), 2)
    samples = [name for rank in batches for given in rank for name in given.samples]
    assert [len(rank) for rank in batches] == [12, 12]
    assert len(samples) == len(set(samples)) == 70
    assert any(not given.samples for given in batches[1])  # it only fills the step


def test_what_a_trainer_cannot_do_is_named_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no check 'evaluations' that a trainer could be unable"):
        check("tests.testing.wrong_trainers:right", tmp_path, cannot={"evaluations": "none"})
    with pytest.raises(ConfigError, match="has no reason"):
        check("tests.testing.wrong_trainers:right", tmp_path, cannot={"evaluation": ""})


def test_an_epoch_that_is_too_short_is_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="the epoch has 12 batches for each rank, too few to save after 10"):
        check("tests.testing.wrong_trainers:right", tmp_path, data=data, save_after=5)


def test_a_report_is_a_row_of_a_table():
    report = Report("a:b", dict.fromkeys(CHECKS, "yes") | {"world": "cannot: one rank"})
    assert report.row() == "| `a:b` | yes | yes | yes | cannot: one rank | yes | yes | yes |"
    assert Report.header().splitlines()[1].count("---") == report.row().count("|") - 1


@pytest.mark.trainers
@pytest.mark.slow
def test_a_process_that_fails_shows_its_last_words(data, tmp_path):
    run = Run(data=data, folder=tmp_path / "checkpoints", records=tmp_path / "failed")
    with pytest.raises(LaunchError, match=r"on 1 ranks ended with the exit codes \[1\](.|\n)*no trainer at all"):
        launch("tests.testing.wrong_trainers:fails", run, world=1)
    run = Run(data=data, folder=tmp_path / "checkpoints", records=tmp_path / "survived", kill_after=3)
    with pytest.raises(LaunchError, match=r"was to be killed in training forward 3, but the ranks had \[0\] forwards"):
        launch("tests.testing.wrong_trainers:survives", run, world=1)
