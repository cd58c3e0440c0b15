"""The example for Lightning, as trainers under test: launched by others, or by Lightning itself."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from examples.lightning_ddp import Finetune, make_trainer
from tests.integrations.lightning_modules import QUIET
from vlm_stream.integrations.lightning import StreamCallback

if TYPE_CHECKING:
    from vlm_stream import StreamLoader
    from vlm_stream.testing.conformance import Run


class Told(Finetune):
    """The example's module, which tells what the trainer counts, and builds its model in the process that trains."""

    def __init__(self, run: Run) -> None:
        super().__init__(None, run.learning_rate)
        self.run = run

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.run.model().train()

    def on_train_start(self) -> None:
        self.run.tell(length=self.trainer.num_training_batches, total_steps=self.trainer.estimated_stepping_batches)


def ddp(run: Run) -> None:
    _train(run, strategy="ddp")


def ddp_spawn(run: Run) -> None:
    _train(run, strategy="ddp_spawn")


class Sharded(Finetune):
    """A module whose devices share one model: they are peers, and must get the same data."""

    def __init__(self, run: Run, *, with_mesh: bool) -> None:
        super().__init__(run.model(), run.learning_rate)
        self.run, self.with_mesh = run, with_mesh

    def configure_model(self) -> None:
        """Leave the model whole: what is tested is the data."""

    def train_dataloader(self) -> StreamLoader:
        return self.run.loader(**{"device_mesh": self.device_mesh} if self.with_mesh else {})


def peers(run: Run) -> None:
    _train_sharded(run, with_mesh=True)


def peers_without_mesh(run: Run) -> None:
    _train_sharded(run, with_mesh=False)


def _train_sharded(run: Run, *, with_mesh: bool) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=run.world)
    options = {"accumulate_grad_batches": run.accumulation, "enable_checkpointing": False, "max_steps": 1}
    trainer = Trainer(**QUIET, strategy=strategy, devices=run.world, callbacks=[StreamCallback()], **options)
    trainer.fit(Sharded(run, with_mesh=with_mesh))


def _train(run: Run, **options: Any) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    module, loader, held_out = Told(run), run.loader(), run.eval_loader()
    trainer = make_trainer(
        run.folder,
        micro_batches=run.accumulation,
        save_every=run.save_after or 1000,
        devices=run.world,
        max_steps=run.max_steps or -1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    validated = {"val_dataloaders": held_out} if run.evaluations else {}
    trainer.fit(module, loader, ckpt_path="last" if run.resume else None, **validated)
    for _ in range(run.evaluations - 1):
        trainer.validate(module, held_out)
