"""Ray Train: packed images and text on several workers, with checkpoints from which any number of workers goes on.

    python examples/ray_train.py SHARDS MODEL_FOLDER --out runs/ray --workers 2
    python examples/ray_train.py SHARDS MODEL_FOLDER --out runs/ray --workers 4 --resume

Ours are three lines: the loader, its state in the checkpoint, and its state out of it. A worker that dies is replaced
by Ray, which then runs `train_on_worker` again on all of them: from the newest checkpoint that was reported.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model

from vlm_stream import StreamLoader

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "run"
FILE = "state.pt"
DEFAULTS = {
    "learning_rate": 1e-5,
    "max_steps": None,
    "save_every": 100,
    "evaluate_every": 100,
    "make_eval_loader": None,
}


def train_on_worker(config: dict[str, Any]) -> None:
    """Train: what Ray runs on each worker."""
    loader: StreamLoader = config["make_loader"]()
    model = config["make_model"]().to(get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    num_steps = loader.steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    step = load(parts)
    parallel = prepare_model(model)
    for number, batch in enumerate(loader, start=1):
        # Batches say how many labels their step has over all ranks; DDP takes the mean over ranks, hence the factor.
        loss = parallel(**batch, use_cache=False).loss * loader.world.size
        loss.backward()
        if number % loader.options.micro_batches:
            continue
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        metrics = {"step": step, "loss": loss.item()}
        if config["make_eval_loader"] is not None and step % config["evaluate_every"] == 0:
            metrics["eval_loss"] = evaluate(model, config["make_eval_loader"]())
        report(metrics, parts if step % config["save_every"] == 0 else None)
        if step == config["max_steps"]:
            break


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: StreamLoader) -> float:
    """Return the mean loss over the labels of all workers."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        labels = (batch["labels"][:, 1:] != -100).sum()
        batch["num_items_in_batch"] = 1  # the loss is then a sum
        total += torch.stack([model(**batch, use_cache=False).loss.double().cpu(), labels])
    model.train()
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


def report(metrics: dict[str, Any], parts: dict[str, Any] | None) -> None:
    """Tell Ray the metrics, with a checkpoint if there are parts to save; all workers must call it."""
    if parts is None or ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = {name: part.state_dict() for name, part in parts.items()}  # the loader's is the same on every rank
        torch.save(saved | {"step": metrics["step"]}, Path(folder) / FILE)
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def load(parts: dict[str, Any]) -> int:
    """Load the newest checkpoint, if there is one; return the number of steps that are done."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / FILE, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def train(
    make_loader: Callable[[], StreamLoader],
    make_model: Callable[[], torch.nn.Module],
    folder: Path,
    *,
    workers: int,
    max_failures: int = 3,
    use_gpu: bool = False,
    **config: Any,
) -> ray.train.Result:
    """Train on so many workers; a run that is in the folder already goes on from its newest checkpoint."""
    config = DEFAULTS | config
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"make_loader": make_loader, "make_model": make_model, **config},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=NAME, storage_path=str(folder.resolve()), failure_config=FailureConfig(max_failures=max_failures)
        ),
    )
    return trainer.fit()


def make_model(folder: str) -> torch.nn.Module:
    """Load the model from a folder."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards")
    parser.add_argument("model", help="folder of the model and its processor")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pack-size", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    if (given.out / NAME).exists() and not given.resume:
        parser.error(
            f"{given.out / NAME} holds a run already, from which Ray would go on: pass --resume, or another --out"
        )
    make_loader = partial(
        StreamLoader,
        given.shards,
        processor=given.model,
        pack_size=given.pack_size,
        micro_batches=given.accumulation,
        fake_image=True,  # every worker runs its vision tower in every batch
        num_workers=2,
    )
    train(
        make_loader,
        partial(make_model, given.model),
        given.out,
        workers=given.workers,
        use_gpu=given.use_gpu,
        save_every=given.save_every,
        max_steps=given.max_steps,
    )


if __name__ == "__main__":
    main()
