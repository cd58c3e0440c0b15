"""The gradient of an accumulated, sharded step is that of one big batch; that of a mean of means is not.

The big batch holds the same packs as rows of one batch, on one rank, and its loss is transformers' own mean over its
labels: no count of ours is in it. Run with `-s` for the figures.
"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.stream.ddp_gradients import OPTIONS
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.testing import build_tiny_model, make_toy_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT = 1e-6
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ddp_gradients.py")
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def shards(saved_processor, tmp_path_factory) -> Path:
    """Images and text of very different lengths."""
    folder = tmp_path_factory.mktemp("loss")
    meta = make_toy_dataset(folder / "toy", num_samples=40)
    names = ("captions", "dialogues")
    make_shards(meta, folder / "shards", names=names, processor=str(saved_processor), samples_per_shard=9)
    return folder / "shards"


@pytest.fixture(scope="module")
def steps_of(shards, processor) -> Callable[..., list[list[Any]]]:
    @cache
    def steps(world: int, micro_batches: int, **options: Any) -> list[list[Any]]:
        """Return the micro-batches of each step, of all ranks."""
        options |= {"processor": processor, "world_size": world, "micro_batches": micro_batches}
        ranks = [list(StreamLoader(shards, rank=rank, **options)) for rank in range(world)]
        return [
            [batch for batches in ranks for batch in batches[begin : begin + micro_batches]]
            for begin in range(0, len(ranks[0]), micro_batches)
        ]

    return steps


@pytest.fixture(scope="module")
def model(processor) -> Any:
    return build_tiny_model("qwen2_5_vl", processor)


def gradients(model: Any, batches: list[dict[str, Any]], scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return what the batches leave together; parameters that none of them reaches have zeros."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        pixels = {"pixel_values": batch["pixel_values"].to(model.dtype)} if "pixel_values" in batch else {}
        (model(**(batch | pixels), use_cache=False).loss * scale).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient."""
    largest = max(float(g.abs().max()) for g in one.values())
    assert largest > 0
    return max(float((g.double() - other[name].double()).abs().max()) for name, g in one.items()) / largest


def tell(figures: str) -> None:
    sys.stdout.write(f"\n{figures}")


def without_count(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "num_items_in_batch"}


SHAPES = [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("dtype", "world", "micro_batches"), [*((torch.float32, *shape) for shape in SHAPES), (torch.float64, 2, 3)]
)
def test_an_accumulated_sharded_step_has_the_gradient_of_one_big_batch(steps_of, model, dtype, world, micro_batches):
    """Over all ranks the losses are added here, which is what averaging world times the loss does."""
    model = copy.deepcopy(model).to(dtype)
    steps = steps_of(world, micro_batches, pack_size=1024)
    whole = steps_of(1, 1, pack_size=1024, batch_size=world * micro_batches)
    assert len(steps) == len(whole) > 1
    for number in (0, len(steps) - 1):
        ours, big = steps[number], without_count(whole[number][0])
        labels = [int((batch["labels"] != -100).sum()) for batch in ours]
        expected = gradients(model, [big])
        exact = difference(expected, gradients(model, ours))
        # What trainers do without a count: the mean of each micro-batch, and the mean of these.
        naive = [without_count(batch) for batch, count in zip(ours, labels, strict=True) if count]
        wrong = difference(expected, gradients(model, naive, 1 / len(ours)))
        tell(
            f"{str(dtype)[6:]}, {world} ranks x {micro_batches} micro-batches, step {number}: labels {labels}; "
            f"difference {exact:.1e}, mean of means {wrong:.1e}"
        )
        assert exact < EXACT
        assert wrong > 1000 * EXACT
    if (world, micro_batches) == (2, 3):  # a step that is filled up with rows that have no labels
        assert 0 in labels


@pytest.mark.parametrize("mode", [{"mode": "plain", "batch_size": 2}, {"mode": "grouped", "batch_size": 2}])
def test_padded_rows(steps_of, processor, mode):
    model = build_tiny_model("qwen2_5_vl", processor).double()
    ours, big = steps_of(2, 2, **mode)[0], steps_of(1, 1, **(mode | {"batch_size": 8}))[0][0]
    assert difference(gradients(model, [without_count(big)]), gradients(model, ours)) < EXACT


def test_labels_that_are_shifted_already(steps_of, processor):
    """A loss of one's own divides by the same number."""
    model = build_tiny_model("qwen2_5_vl", processor).double()
    ours = steps_of(2, 2, pack_size=1024, hf_labels=False)[0]
    big = steps_of(1, 1, pack_size=1024, batch_size=4)[0][0]
    expected = gradients(model, [without_count(big)])
    model.zero_grad(set_to_none=True)
    for batch in ours:
        inputs = {name: value for name, value in without_count(batch).items() if name != "labels"}
        inputs |= {"pixel_values": inputs["pixel_values"].double()} if "pixel_values" in inputs else {}
        logits = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss / batch["num_items_in_batch"]).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    assert difference(expected, found) < EXACT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_with_ddp(shards, steps_of, processor, saved_processor, tmp_path):
    """With the count of the index, and with the count that two processes add up."""
    micro_batches = 3
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [str(shards), str(saved_processor), str(tmp_path), str(micro_batches)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=os.environ
            | common
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    model = build_tiny_model("qwen2_5_vl", processor)
    whole = steps_of(1, 1, batch_size=2 * micro_batches, **OPTIONS)
    for number, way in enumerate(("index", "all-reduce")):
        expected = gradients(model, [without_count(whole[number][0])])
        exact = difference(expected, torch.load(tmp_path / f"{way}.pt", weights_only=True))
        tell(f"DDP, 2 processes x {micro_batches} micro-batches, count by {way}, step {number}: difference {exact:.1e}")
        assert exact < EXACT
