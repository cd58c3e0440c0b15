"""Ray Train: a real raylet, real workers, workers that are killed."""

import os
import subprocess
import sys

import pytest

from vlm_stream.testing.conformance import Run, check, launch
from vlm_stream.testing.conformance.compare import compare_batches, own_loop

pytestmark = pytest.mark.trainers

TRAINERS = "tests.integrations.ray_trainers"
TIMEOUT_S = 600.0


def test_the_example_conforms(conformance_data, tmp_path):
    report = check(f"{TRAINERS}:train", tmp_path, data=conformance_data, own_launcher=True, timeout_s=TIMEOUT_S)
    assert set(report.results.values()) == {"yes"}


@pytest.mark.slow
def test_ray_restores_a_killed_worker_and_a_loader_from_the_driver_goes_on(conformance_data, tmp_path):
    run = Run(
        data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "records", save_after=2, max_steps=4
    )
    got = launch(f"{TRAINERS}:train_restored", run, world=2, own_launcher=True, timeout_s=TIMEOUT_S)
    saved, end = 2 * run.accumulation, 4 * run.accumulation
    want = [batches[:end] for batches in own_loop(run, 2)]
    for rank in range(2):
        assert got.told[rank] == {"ray_rank": rank, "ray_size": 2, "rank": rank}
        # What came between the save and the kill was trained for nothing, and comes again behind the restore.
        seen = got.train[rank]
        lost = len(seen) - end
        assert lost in ((1,) if rank else (0, 1))
        assert not compare_batches({0: seen[:saved] + seen[saved + lost :]}, [want[rank]], whole=True)


@pytest.mark.parametrize("api", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_process_that_only_imports_ray_train_is_none_of_its_workers(api):
    code = "import ray.train; from vlm_stream.world import find_world; w = find_world(); print(w.rank, w.size)"
    environment = os.environ | {"RAY_TRAIN_V2_ENABLED": api, "RANK": "1", "WORLD_SIZE": "2"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["1", "2"], found.stderr
