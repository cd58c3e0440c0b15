"""The example for Ray Train as a trainer under test. One process is started: Ray starts the workers."""

import itertools
import os
import signal
import time
from functools import partial

import ray.train
import torch.distributed as dist

from examples import ray_train
from vlm_stream.world import find_world


def train(run):
    _start(run)
    _train(run, partial(_make_loader, run), partial(_make_model, run), max_failures=0)


def train_restored(run):
    """With a loader that was built here and sent to the workers; one of them is killed, and Ray restores the run."""
    _start(run)
    loader = run.loader()
    assert find_world().told_by == "nobody"  # this process is none of the workers
    _train(run, partial(_check_world, run, loader), partial(_make_mortal, run), max_failures=1)


def _start(run):
    ray.init(address="local", num_cpus=run.world + 1, include_dashboard=False)


def _train(run, make_loader, make_model, *, max_failures):
    ray_train.train(
        make_loader,
        make_model,
        run.folder,
        workers=run.world,
        max_failures=max_failures,
        make_eval_loader=run.eval_loader if run.evaluations else None,
        evaluate_every=3,  # two of the steps that a resume has left
        learning_rate=run.learning_rate,
        save_every=run.save_after or 10_000,
        max_steps=run.max_steps,
    )


def _make_loader(run):
    loader = run.loader()
    run.tell(length=len(loader), total_steps=loader.steps_per_epoch)
    return loader


def _check_world(run, loader):
    """Return the loader that came with the function; first ask Ray for the rank, then torch.distributed."""
    context = ray.train.get_context()
    run.tell(ray_rank=context.get_world_rank(), ray_size=context.get_world_size(), rank=loader.world.rank)
    return loader


def _make_model(run):
    """Return the model, which waits behind the save: a checkpoint that Ray's controller never saw is none."""
    model = run.model()
    if run.save_after is not None and ray.train.get_checkpoint() is None:
        model.register_forward_pre_hook(partial(_wait_for_ray, run, itertools.count(1)), prepend=True)
    return model


def _wait_for_ray(run, numbers, module, args):
    if next(numbers) > run.save_after * run.accumulation:
        while not (run.folder / ray_train.NAME / "checkpoint_manager_snapshot.json").exists():
            time.sleep(0.05)


def _make_mortal(run):
    """Return that model; rank 1 kills itself in the first forward behind the save, once."""
    model = _make_model(run)
    if dist.get_rank() == 1 and ray.train.get_checkpoint() is None:
        model.register_forward_pre_hook(partial(_die, run, itertools.count(1)))
    return model


def _die(run, numbers, module, args):
    if next(numbers) > run.save_after * run.accumulation:
        os.kill(os.getpid(), signal.SIGKILL)
