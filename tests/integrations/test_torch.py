"""torch's own parallel training: the examples conform; checkpoints of torch.distributed hold the loader."""

import io
import itertools
import json

import pytest
import torch

from vlm_stream.testing.conformance import Run, check, launch
from vlm_stream.testing.conformance.compare import own_loop


@pytest.mark.trainers
@pytest.mark.parametrize(("name", "num_workers"), [("ddp", 1), pytest.param("fsdp2", 0, marks=pytest.mark.slow)])
def test_an_example_conforms(conformance_data, tmp_path, name, num_workers):
    function = f"tests.integrations.torch_trainers:{name}"
    report = check(function, tmp_path, data=conformance_data, num_workers=num_workers)
    assert set(report.results.values()) == {"yes"}


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_an_example_runs_from_the_command_line(conformance_data, tmp_path, example):
    for resume in (False, True):  # each in processes of its own: a group that is made twice in one may hang
        run = Run(data=conformance_data, folder=tmp_path / "out", records=tmp_path / f"records-{resume}", resume=resume)
        launch(f"tests.integrations.torch_trainers:{example}_command", run, world=2)
        assert (run.records / "output-0.txt").read_text().count("loss after training: ") == 1
        assert "loss" not in (run.records / "output-1.txt").read_text()


def samples_of(rows):
    return sorted(tuple(name) for name in rows)


@pytest.mark.trainers
def test_checkpoints_of_two_ranks_are_loaded_by_two_one_and_three(conformance_data, tmp_path):
    run = Run(data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "records")
    launch("tests.integrations.torch_trainers:dcp_worlds", run, world=3)
    taken: dict[str, list] = {}
    for rank in range(3):
        for name, rows in json.loads((run.folder / f"taken-{rank}.json").read_text()).items():
            taken.setdefault(name, []).extend(rows)
    whole = samples_of(name for rank in own_loop(run, 1) for given in rank for name in given.samples)
    assert len(whole) == len(set(whole)) == 70
    before = taken.pop("2")
    assert 0 < len(before) < len(whole)
    for size in (2, 1, 3):
        assert samples_of(taken.pop(f"new, 2 to {size}")) == whole
        for how in ("", ", used"):
            assert samples_of(before + taken.pop(f"2 to {size}{how}")) == whole
    some = taken.pop("2 to 1, some")
    assert some
    assert samples_of(before + some + taken.pop("2 to 1 to 3")) == whole
    assert not taken


@pytest.mark.parametrize("num_batches", [0, 3])
def test_a_state_goes_through_torch_save_with_weights_only(conformance_data, tmp_path, num_batches):
    run = Run(data=conformance_data, folder=tmp_path, records=tmp_path)
    loader = run.loader(rank=0, world_size=1, with_refs=True)
    for _ in itertools.islice(loader, num_batches):
        pass
    file = io.BytesIO()
    torch.save({"data": loader.state_dict()}, file)
    file.seek(0)
    again = run.loader(rank=0, world_size=1, with_refs=True)
    again.load_state_dict(torch.load(file, weights_only=True)["data"])
    assert [batch["refs"] for batch in again] == [batch["refs"] for batch in loader]
