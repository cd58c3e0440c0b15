"""Builders on Ray without data: their batches are numbers, as in `tests/dispatch/jobs.py`."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from tests.dispatch.jobs import NumberBuilder, Numbers, plan
from vlm_stream.dispatch import Dispatcher, DispatchOptions, RayPool


class Nobody:
    def begin(self, ref):
        pass

    def end(self):
        pass


class ClosingBuilder(NumberBuilder):
    is_closed = False

    def close(self):
        self.is_closed = True


@dataclass
class RayNumbers(Numbers):
    name: str = "numbers"
    size: int = 0
    needs_ray: bool = False

    @property
    def options(self):
        return SimpleNamespace(cache_dir=None)

    def digest(self, *, with_reading=False):
        return self.name

    def open(self, watch):
        if self.needs_ray and multiprocessing.parent_process() is not None:
            raise ImportError("there is no processor on this machine")
        return ClosingBuilder(self, watch or Nobody())

    def make(self, number):
        return {"number": number, "pid": os.getpid(), "data": torch.zeros(self.size, dtype=torch.uint8)}


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def dispatch_on_ray(config, builders, count=20, **options):
    options = {"num_workers": 0 if builders.pool else builders.count, "num_reserves": builders.local} | options
    return Dispatcher(plan(count), lambda listener: RayPool(config, listener, builders), DispatchOptions(**options))


def run_on_ray(config, builders, count=20, **options):
    """Return the batches of a run to its end."""
    dispatcher = dispatch_on_ray(config, builders, count, **options)
    try:
        batches = [delivery.batch for _, delivery in dispatcher]
    finally:
        dispatcher.close()
    assert [batch["number"] for batch in batches] == list(range(count))
    return batches
