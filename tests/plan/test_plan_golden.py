"""Golden digests of the unit stream: whoever changes them changes the order of samples in running trainings.

They may change only together with an entry under "Changes sample order" in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from vlm_stream.plan import (
    BalanceConfig,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    StepShape,
    units,
)

CONFIGS = {
    "packed": PlanConfig(
        seed=1,
        window=512,
        mode=PackConfig(pack_size=8192),
        order=OrderConfig(group_shards=4),
        mixture=MixtureConfig(stop="each"),
    ),
    "grouped": PlanConfig(
        seed=2,
        window=256,
        epochs=2,
        mode=GroupConfig(),
        mixture=MixtureConfig(weigh_by="size", stop="all"),
    ),
    "plain": PlanConfig(
        seed=3,
        window=100,
        mode=PlainConfig(max_tokens=4096),
        order=OrderConfig(group_shards=2, run_length=4),
        balance=BalanceConfig(barrier="micro", horizon=2),
    ),
}
# Golden: results of this code, kept so that a change is seen.
STREAMS = {"packed": "ef8dc3e72a26354f", "grouped": "493c3d0960739372", "plain": "066fef3efc8f64ff"}
DEALS = {"packed": "1af30085ae612bc3", "grouped": "07241940a509f81e", "plain": "e433b7e4a410a026"}


def sources_of(make):
    return [
        make.source("a", [60] * 10 + [7]),
        make.source("b", [30] * 5, weight=0.5, sample_ratio=0.7),
        make.source("c", [9] * 4, sample_ratio=1.6),
    ]


def lengths(rng, n):
    # Raw output, which numpy promises not to change.
    return (rng.bit_generator.random_raw(n) % np.uint64(9000)).astype(np.int64) + 1


def digests(make, name):
    plan = make.planner(sources_of(make), CONFIGS[name], lengths)
    with patch.object(units, "CHUNK_UNITS", 32):
        stream = hashlib.blake2b(json.dumps(make.stream(plan)).encode(), digest_size=8).hexdigest()
        *_, last = plan.steps(StepShape(world_size=3, micro_batches=2, batch_size=2))
    return stream, last.state_after()["delivered"][3][:16]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_order_of_samples_has_not_changed(make, name):
    assert digests(make, name) == (STREAMS[name], DEALS[name])


SCRIPT = """
import importlib.util, sys
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
shared, golden = load(sys.argv[1]), load(sys.argv[2])
class Make:
    source, planner, stream = shared.source, shared.planner, shared.unit_stream
print(" ".join(part for name in sorted(golden.CONFIGS) for part in golden.digests(Make, name)))
"""


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_other_processes_with_other_hash_seeds_plan_the_same(make, hash_seed):
    here = Path(__file__)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(here.with_name("conftest.py")), str(here)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(here.parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.split() == [part for name in sorted(CONFIGS) for part in digests(make, name)]


def test_the_plan_needs_numpy_alone():
    code = (
        "import sys, vlm_stream.plan; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'numba', 'obstore') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
