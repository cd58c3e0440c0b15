"""The examples for transformers, TRL and accelerate, as trainers under test."""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from vlm_stream import StreamLoader
from vlm_stream.testing.conformance.run import digests

if TYPE_CHECKING:
    from vlm_stream.testing.conformance import Run


class Tell(TrainerCallback):
    """Tells what Trainer has counted, as soon as it has."""

    def __init__(self, run: Run, loader: Any) -> None:
        self.run, self.loader = run, loader

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.tell(length=len(self.loader), total_steps=state.max_steps)


def settings(run: Run) -> dict[str, Any]:
    """Plain SGD on the CPU without clipping: gradients are compared."""
    saving = {"save_strategy": "no"} if run.save_after is None else {"save_steps": run.save_after}
    return {
        "optim": "sgd",
        "learning_rate": run.learning_rate,
        "max_grad_norm": 0,
        "max_steps": -1 if run.max_steps is None else run.max_steps,
        "num_train_epochs": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        **saving,
    }


def transformers_trainer(run: Run) -> None:
    from examples import transformers_trainer as example

    _train(run, example)


def trl_sft(run: Run) -> None:
    from examples import trl_sft as example

    _train(run, example, gradient_checkpointing=False, bf16=False)


def _train(run: Run, example: Any, **more: Any) -> None:
    loader = run.loader()
    trainer = example.train(
        loader,
        run.model(),
        run.folder,
        eval_loader=run.eval_loader(),
        resume=run.resume,
        callbacks=[Tell(run, loader)],
        **settings(run),
        **more,
    )
    losses = {trainer.evaluate()["eval_loss"] for _ in range(run.evaluations)}
    assert len(losses) <= 1
    end(trainer)


def end(trainer: Any) -> None:
    """End the process group once gloo's threads have let go of their tensors.

    They need the interpreter's lock for it, and the group, which is freed with the model, waits for them without giving
    it away.
    """
    time.sleep(0.2)
    trainer.end()


def accelerate_loop(run: Run) -> None:
    from accelerate import Accelerator

    from examples import accelerate_loop as example

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run.accumulation)
    loader, eval_loader = run.loader(), run.eval_loader()
    run.tell(length=len(loader), total_steps=len(loader) // run.accumulation)
    model = example.train(
        accelerator,
        loader,
        run.model(),
        run.folder,
        learning_rate=run.learning_rate,
        save_after=run.save_after,
        resume=run.resume,
    )
    losses = {example.evaluate(accelerator, eval_loader, model) for _ in range(run.evaluations)}
    assert len(losses) <= 1
    time.sleep(0.2)
    accelerator.end_training()


class NoCounts(StreamLoader):
    """Batches as they are where the index does not know labels: no count, except for a 1 where there are no labels."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if (batch["labels"] != -100).any():
                del batch["num_items_in_batch"]
            else:
                batch["num_items_in_batch"] = torch.tensor(1)
            yield batch


def transformers_without_counts(run: Run) -> None:
    from examples import transformers_trainer as example

    loader = NoCounts(run.sources, options=run.loader().options, processor=run.processor())
    end(example.train(loader, run.model(), run.folder, **settings(run)))


def evaluate_with_trainer(run: Run) -> None:
    from transformers import TrainingArguments

    from vlm_stream.integrations.transformers import StreamTrainer

    arguments = TrainingArguments(str(run.folder), **settings(run))
    trainer = StreamTrainer(model=run.model(), args=arguments, eval_dataset=run.eval_loader())
    run.tell(eval_loss=trainer.evaluate()["eval_loss"])
    end(trainer)


def bare_streams(run: Run) -> None:
    """Write down what accelerate makes of DataLoaders over a VLMStream."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    found = {}
    for dispatch, batch_size, num_workers in itertools.product((None, True, False), (None, 1), (0, 1)):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = DataLoader(run.stream(), batch_size=batch_size, num_workers=num_workers)
        try:
            result: Any = [digests(batch) for batch in accelerator.prepare(loader)]
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        found[f"{dispatch} {batch_size} {num_workers}"] = result
    (run.folder / f"found-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()
