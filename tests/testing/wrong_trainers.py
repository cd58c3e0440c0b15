"""Trainers with mistakes, for conformance to find."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream import StreamLoader
    from vlm_stream.testing.conformance import Run


@dataclass(frozen=True)
class Trainer:
    """A right one, unless told otherwise."""

    change: Callable[[dict[str, Any]], Any] = lambda batch: None
    loader: Callable[[Run], StreamLoader] = lambda run: run.loader()
    total: Callable[[StreamLoader], int] = lambda loader: loader.steps_per_epoch
    ahead: int = 0
    mean: bool = False
    evaluated: int | None = None

    def train(self, run: Run) -> None:
        dist.init_process_group("gloo")
        model, loader = run.model(), self.loader(run)
        run.tell(length=len(loader), total_steps=self.total(loader))
        if run.resume:
            loader.load_state_dict(torch.load(run.folder / "data.pt", weights_only=True))
        self.fit(run, model, loader)
        held_out = run.eval_loader()
        model.eval()
        for number in range(run.evaluations):
            for place, batch in enumerate(held_out):
                if number and place == self.evaluated:
                    break
                model(**batch, use_cache=False)
        dist.destroy_process_group()

    def fit(self, run: Run, model: Any, loader: StreamLoader) -> None:
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=run.learning_rate)
        total, done = self.total(loader), 2 * run.resume
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - (step + done) / total))
        for number, batch in enumerate(self.take(loader), 1):
            last = number % run.accumulation == 0
            self.change(batch)
            if self.mean:
                batch.pop("num_items_in_batch")
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = parallel(**batch, use_cache=False).loss
                (loss / run.accumulation if self.mean else loss * dist.get_world_size()).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            if run.save_after and number == run.save_after * run.accumulation and dist.get_rank() == 0:
                torch.save(loader.state_dict(), run.folder / "data.pt")

    def take(self, loader: StreamLoader) -> Iterator[dict[str, Any]]:
        waiting = []
        for batch in loader:
            waiting.append(batch)
            if len(waiting) > self.ahead:
                yield waiting.pop(0)
        yield from waiting


right = Trainer().train
same_data_for_all = Trainer(loader=lambda run: run.loader(rank=0, world_size=1)).train
saves_late = Trainer(ahead=1).train
four_mistakes = Trainer(
    change=lambda batch: batch.pop("mm_token_type_ids"),  # a key is dropped
    mean=True,  # each micro-batch counts the same, however many labels it has
    total=len,  # micro-batches are taken for steps
    evaluated=3,  # the second evaluation ends early
).train


def fails(run: Run) -> None:
    raise RuntimeError("no trainer at all")


def survives(run: Run) -> None:
    run.model()
