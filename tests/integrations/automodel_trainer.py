"""The example for NeMo Automodel as a trainer under test, and the comparison with our own loop.

Run in the environment of its own: `python -m tests.integrations.automodel_trainer DATA FOLDER OUT.json`; DATA is what
`make_data` wrote, with a folder `model`.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vlm_stream.integrations.automodel import PackedRows
from vlm_stream.testing import build_tiny_model
from vlm_stream.testing.conformance import Records, Run, check
from vlm_stream.testing.conformance import run as record
from vlm_stream.testing.conformance.compare import compare_gradients
from vlm_stream.testing.conformance.run import PACK_SIZE

NEVER = 10_000


def train(run):
    from examples import automodel
    from tests.integrations import automodel_cpu

    automodel_cpu.install()
    shards, model = str(run.data / "shards"), str(run.data / "model")
    os.environ |= {"SHARDS": shards, "VALIDATION_SHARDS": shards, "MODEL": model, "CHECKPOINTS": str(run.folder)}
    stream = {"pack_size": PACK_SIZE, "fake_image": True}
    changes = {
        "step_scheduler.global_batch_size": run.accumulation * run.world,
        "dataset.global_batch_size": run.accumulation * run.world,
        "step_scheduler.ckpt_every_steps": run.save_after or NEVER,
        "step_scheduler.val_every_steps": 3 if run.evaluations else NEVER,  # two of the steps that a resume has left
        "step_scheduler.validate_on_checkpoint": False,
        "dataset.options": stream,
        "validation_dataset.options": stream | {"train": False},
        "model.torch_dtype": "float32",
        "distributed.strategy": "ddp",
        "dist_env.backend": "gloo",
        "optimizer._target_": "torch.optim.SGD",
        "optimizer.lr": run.learning_rate,
        "clip_grad_norm.max_norm": 1e9,
        "checkpoint.save_consolidated": False,
    }

    def begin(recipe):
        (model,) = recipe.model_parts
        watch(getattr(model, "module", model), recipe.loss_fn, run)
        run.tell(length=len(recipe.dataloader), total_steps=recipe.step_scheduler.epoch_len)

    automodel.train([text for name, value in changes.items() for text in (f"--{name}", str(value))], before=begin)


def watch(model, loss, run):
    """Record what the model is given together with the labels, which this recipe keeps for the loss."""
    given = {}
    model.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)

    def see(_, args, kwargs):
        record._see_forward(run, model, (), given | {"labels": kwargs["labels"]})
        given.clear()

    loss.register_forward_pre_hook(see, with_kwargs=True)
    register_optimizer_step_post_hook(partial(record._see_step, run, model))


def first_gradients(run):
    """Gradients of the first step of two ranks: the mean over all labels of one big batch, in float64."""
    with run.loader(rank=0, world_size=1, micro_batches=1, batch_size=2 * run.accumulation) as loader:
        batch = dict(next(iter(loader)))
    labels = batch.pop("labels")
    batch["pixel_values"] = batch["pixel_values"].double()
    model = build_tiny_model("qwen2_5_vl", run.processor()).double()
    torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def main(data, folder, out):
    run = Run(data=data, folder=folder, records=folder)
    collate = PackedRows(packed_as="block_causal", pack_size=PACK_SIZE)
    report = check(
        "tests.integrations.automodel_trainer:train",
        folder,
        data=data,
        cannot={"gradients": "compared below, because its labels are shifted already"},
        timeout_s=600.0,
        collate_fn=collate,
    )
    found = Records.read(folder / "records" / "killed").gradients
    differences = compare_gradients(found, first_gradients(replace(run, options={"collate_fn": collate})))
    results = report.results | {"gradients": "; ".join(differences) or "yes", "ranks with gradients": sorted(found)}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
