"""Builders without data: their batches are numbers or tensors, and they may trip over some of them."""

import os
import time
from dataclasses import dataclass, field

from vlm_stream.blueprint import BatchName, Blueprint, Piece, Planned, Work
from vlm_stream.build import Delivery
from vlm_stream.dispatch import Dispatcher, DispatchOptions, ProcessPool
from vlm_stream.tokens import MediaSizes

COUNT = 40


def blueprint(number, pixels=0):
    piece = Piece((0, 1, number), f"key-{number}", 0, None, MediaSizes(), ())
    return Blueprint(
        name=BatchName("plan", number, 0, 0),
        rows=((piece,),),
        dropped=(),
        work=Work(1, 10, 100, pixels, 0),
        labels=None,
        step_labels=None,
        num_in_step=1,
    )


def plan(count=COUNT, begin=0):
    for number in range(begin, count):
        yield Planned(blueprint(number), lambda number=number: {"number": number})


class Reading:
    def cancel(self):
        pass


@dataclass
class Numbers:
    """Batches are their numbers; it may trip over some of them, once for each flag file or always."""

    acts: dict = field(default_factory=dict)
    flags: tuple = ()
    seconds: float = 0.0
    num_bytes: int = 100

    def open(self, watch):
        return NumberBuilder(self, watch)

    def modules(self):
        return [__name__]

    def make(self, number):
        return {"number": number, "pid": os.getpid()}

    def fetch(self, number):
        pass


class NumberBuilder:
    def __init__(self, config, watch):
        self.config, self.watch = config, watch

    def begin(self, blueprint):
        self.config.fetch(blueprint.name.step)
        return Reading()

    def finish(self, blueprint, _reading, skipped):
        begin = time.perf_counter()
        number, config = blueprint.name.step, self.config
        batch = config.make(number)
        ref = (0, 1, number)
        if ref in skipped:
            batch["said"] = skipped[ref]
        else:
            self.watch.begin(ref)
            if number in config.acts and self._is_its_turn():
                config.acts[number]()
            time.sleep(config.seconds)
            self.watch.end()
        return deliver(blueprint, batch, time.perf_counter() - begin, config.num_bytes)

    def _is_its_turn(self):
        if not self.config.flags:
            return True
        for flag in self.config.flags:
            try:
                flag.touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False


def deliver(blueprint, batch, seconds=0.0, num_bytes=100):
    return Delivery(
        name=blueprint.name,
        batch=batch,
        bad=(),
        num_samples=1,
        num_tokens=0,
        num_planned_tokens=0,
        num_labels=0,
        num_planned_labels=None,
        num_step_labels=None,
        num_in_step=1,
        num_rows=1,
        num_slots=0,
        num_bytes=num_bytes,
        seconds={"fetch": 0.0, "encode": seconds, "collate": 0.0},
        reads=None,
        reader="",
    )


def dispatch(config, count=COUNT, *, start_method="fork", plan_of=plan, **options):
    options = {"num_workers": 3, **options}
    return Dispatcher(
        plan_of(count),
        lambda listener: ProcessPool(config, listener, start_method=start_method),
        DispatchOptions(**options),
    )


def run(config, count=COUNT, **options):
    dispatcher = dispatch(config, count, **options)
    try:
        batches = [delivery.batch for _, delivery in dispatcher]
    finally:
        dispatcher.close()
    assert [batch["number"] for batch in batches] == list(range(count))
    return batches, dispatcher
