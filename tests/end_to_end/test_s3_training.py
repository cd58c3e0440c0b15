"""The whole story: JSON -> shards on S3 -> two ranks train -> kill -9 -> one rank goes on -> every sample came once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vlm_stream.convert import make_shards, verify_dataset
from vlm_stream.testing import make_toy_dataset

TRAINER = Path(__file__).with_name("train.py")
NUM_SAMPLES = 260


@pytest.fixture
def trained(tmp_path, s3_server, saved_processor):
    meta = make_toy_dataset(tmp_path / "raw", num_samples=NUM_SAMPLES)
    url = s3_server.url("story")
    report = make_shards(
        meta, url, processor=str(saved_processor), samples_per_shard=20, shuffle=0, store=s3_server.options
    )
    assert report.totals.samples == NUM_SAMPLES
    assert not verify_dataset(url, store=s3_server.options).problems
    out = tmp_path / "out"
    out.mkdir()
    return url, out


def launch(url, out, processor, endpoint, num_ranks, name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(TRAINER), url, str(processor), str(out), endpoint]
    environment = os.environ | {"RUN_NAME": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with (out / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def kill_all(launcher, out):
    """Kill the launcher and every rank at once, as a machine that loses power would; ranks are no children of ours."""
    for pid in [launcher.pid, *(int(path.read_text()) for path in out.glob("pid-*"))]:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def lines(out, name):
    found = [line for path in sorted(out.glob(f"log-{name}-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in found if line.endswith("}")]


def test_train_kill_and_go_on_with_another_world(trained, s3_server, saved_processor):
    url, out = trained
    endpoint = s3_server.options.endpoint
    first = launch(url, out, saved_processor, endpoint, 2, "first")
    try:
        wait_until(lambda: any(line["step"] >= 13 for line in lines(out, "first")), first, out / "first.log")
    finally:
        kill_all(first, out)
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=False)
    assert checkpoint["step"] >= 10
    assert not (out / "done-first").exists()  # it was killed in the middle
    assert len(checkpoint["data"]) < 16 * 1024

    second = launch(url, out, saved_processor, endpoint, 1, "second")
    assert second.wait(timeout=240) == 0, (out / "second.log").read_text()
    before = [line for line in lines(out, "first") if line["step"] < checkpoint["step"]]
    after = lines(out, "second")
    delivered = [key for line in before + after for key in line["keys"]]
    assert sorted(delivered) == sorted(set(delivered))
    assert len(delivered) == NUM_SAMPLES

    start = sum(line["loss"] for line in before[:4]) / 4
    end = sum(line["loss"] for line in after[-4:] if line["loss"] > 0) / 4
    assert after[0]["loss"] < start  # the curve goes on where it was
    assert end < start


def wait_until(condition, process, log):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
