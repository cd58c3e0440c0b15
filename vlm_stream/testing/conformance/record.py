"""Hooks that record what the model and the optimizer are given, in whatever the trainer wraps them; `Records` of it.

A line of JSON for each event, in a file for each rank, closed before training goes on: SIGKILL loses nothing. Hooks are
module-level functions over a frozen `Run`, so that models may be copied and pickled with them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vlm_stream.testing.conformance.run import Run

__all__ = ["Keys", "Records", "digests", "watch", "write_line"]

Keys: TypeAlias = dict[str, str]
"""Of one batch: a digest for each key."""

_forwards = 0
"""Training forwards of this process."""
_watching = False
"""Whether this process has the optimizer's hook."""


def watch(model: Any, run: Run) -> Any:
    """Return the model with its forwards recorded, and record the steps of every optimizer of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    global _watching
    model.register_forward_pre_hook(functools.partial(_see_forward, run), with_kwargs=True)
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(functools.partial(_see_step, run, model))
    return model


def digest(value: Any) -> str:
    """Return what identifies a value, wherever it lies: of a tensor its dtype, shape and bytes."""
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{form} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def digests(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each key. Label counts are numbers: trainers may send them in another form."""
    found = {key: digest(value) for key, value in batch.items() if value is not None}
    if batch.get("num_items_in_batch") is not None:
        found["num_items_in_batch"] = str(int(batch["num_items_in_batch"]))
    return found


def write_line(run: Run, line: dict[str, Any]) -> None:
    """Append an event to this rank's file."""
    run.records.mkdir(parents=True, exist_ok=True)
    rank, world = _place()
    with (run.records / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "rank": rank, "world": world, "pid": os.getpid()}) + "\n")


def _place() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _see_forward(run: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _forwards
    named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    write_line(run, {"kind": "train" if module.training else "eval", "keys": digests(named)})
    if module.training:
        _forwards += 1
        if run.kill_after is not None and _forwards >= run.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def _see_step(run: Run, model: Any, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    # After the step, not before it: a trainer that hands over a closure has its gradients only then.
    import torch

    rate = float(optimizer.param_groups[0]["lr"])
    if rate == 0:  # torch.distributed.checkpoint makes such a step to have an optimizer's state allocated
        return
    write_line(run, {"kind": "step", "lr": rate})
    rank, _ = _place()
    path = run.records / f"gradients-{rank}.pt"
    if path.exists():
        return
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            gradients[name] = whole.detach().to("cpu", torch.float32).clone()
    torch.save(gradients, path)


@dataclass(frozen=True, slots=True)
class Records:
    """What the ranks of one launch were given, by rank."""

    train: dict[int, list[Keys]]
    """Batches of the forwards in training mode."""
    evaluated: dict[int, list[Keys]]
    """Those in eval mode."""
    rates: dict[int, list[float]]
    """Learning rates of the optimizer steps."""
    told: dict[int, dict[str, float | None]]
    """What the trainer told with `run.tell`."""
    worlds: set[int]
    """Sizes of the world as the processes saw it at training forwards."""
    gradients: dict[int, dict[str, Any]]
    """Of the first optimizer step, by name of the parameter."""

    @classmethod
    def read(cls, folder: Path) -> Records:
        """Read the records of a launch."""
        import torch

        found = cls(train={}, evaluated={}, rates={}, told={}, worlds=set(), gradients={})
        for path in sorted(folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                found._add(json.loads(line))
        for path in folder.glob("gradients-*.pt"):
            found.gradients[int(path.stem.split("-")[1])] = torch.load(path, weights_only=True)
        return found

    def _add(self, line: dict[str, Any]) -> None:
        rank = line["rank"]
        if line["kind"] == "train":
            self.train.setdefault(rank, []).append(line["keys"])
            self.worlds.add(line["world"])
        elif line["kind"] == "eval":
            self.evaluated.setdefault(rank, []).append(line["keys"])
        elif line["kind"] == "step":
            self.rates.setdefault(rank, []).append(line["lr"])
        else:
            self.told.setdefault(rank, {}).update(line["facts"])
