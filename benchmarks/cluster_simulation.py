"""A simulated cluster: for how much of their time trainers wait, dispatched by cost or in order.

    python benchmarks/cluster_simulation.py [--ranks 512] [--builders 2000] [--steps 400] [--busy 0.8] [--deaths 0.01]

What samples take to build is measured here first: pictures and clips of 5 to 300 s, fetched, decoded and encoded for
Qwen2.5-VL (the clips mixture of `peers/data.py`). A batch of the simulation is 8 of them, drawn at random. All ranks
take their next batch at the same time, as data-parallel trainers do. Each rank has its part of the builders, 3 or 4;
steps take so long that ranks with the fewest keep them busy for `--busy` of the time.

Dispatched: the real rules (`vlm_stream/dispatch/schedule.py`), with estimates that are off by 20 %; `--deaths` of the
builders die in an hour, and each is replaced after 30 s. In order: worker n of a rank builds batches n, n + w, n + 2w
and so on, two ahead, as torch's DataLoader does; nobody dies there, because one dead worker would end the run. A clock
without threads: nothing but the measured times depends on this machine.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_stream.dispatch.schedule import Schedule

SAMPLES = 8
BATCH_BYTES = 30_000_000
MAX_BYTES = 1 << 30
AHEAD = 2
"""Batches that a worker of torch's DataLoader builds ahead."""
REPLACED_S = 30.0
CHECK_S = 0.1


def measure(num_samples: int) -> list[float]:
    """Return what real samples take to build."""
    from benchmarks.peers.data import make_raw, read_raw
    from benchmarks.peers.loaders.ours import OurLoader
    from vlm_stream import VLMStream

    with tempfile.TemporaryDirectory() as name:
        shards, processor = Path(name) / "shards", Path(name) / "processor"
        OurLoader().write(read_raw(make_raw(Path(name) / "raw", "clips", num_samples + 2)), shards, 20)
        stream = VLMStream(shards, processor=str(processor), mode="plain", max_frames=32)
        plan = stream.plan()
        found = []
        with plan.build.open() as builder:
            for planned in plan.blueprints(stream.world):
                found.append(sum(builder.build(planned.blueprint).seconds.values()))
                if len(found) > num_samples:
                    break
    return found[1:]  # the first one imports decoders


class Rank:
    """One trainer with its builders, by the real rules."""

    def __init__(self, costs: list[float], num_builders: int, draw: random.Random) -> None:
        """Start at time 0."""
        self.costs, self.draw = costs, draw
        self.schedule = Schedule(MAX_BYTES)
        self.num_planned = 0
        self.events: list[tuple[float, int, int]] = []
        """Times at which builders finish batches."""
        self.newest = num_builders
        self.queues: dict[int, list[int]] = {}
        for builder in range(num_builders):
            self.join(builder)

    def join(self, builder: int) -> None:
        """Let a builder work."""
        self.queues[builder] = []
        self.schedule.add_builder(builder)

    def lose(self, builder: int) -> None:
        """Let one die, with what it has."""
        del self.queues[builder]
        self.events = [event for event in self.events if event[1] != builder]
        heapq.heapify(self.events)
        self.schedule.remove_builder(builder)

    def move(self, now: float) -> None:
        """Do what the rules say."""
        while self.num_planned < len(self.costs) and self.schedule.wants_plan:
            guess = self.costs[self.num_planned] * self.draw.lognormvariate(0, 0.2)
            self.schedule.plan(guess, BATCH_BYTES, SAMPLES)
            self.num_planned += 1
        for move in self.schedule.moves(now):
            queue = self.queues[move.builder]
            if move.is_drop:
                queue.remove(move.number)
                continue
            queue.append(move.number)
            if len(queue) == 1:
                self.begin(move.builder, now)

    def begin(self, builder: int, now: float) -> None:
        """Let a builder begin with the first of its queue."""
        number = self.queues[builder][0]
        heapq.heappush(self.events, (now + self.costs[number], builder, number))

    def finish(self) -> float:
        """Let the next builder finish; return when."""
        now, builder, number = heapq.heappop(self.events)
        self.queues[builder].remove(number)
        self.schedule.finish(builder, number, now, result=number, num_bytes=BATCH_BYTES, fetch_share=0.0)
        if self.queues[builder]:
            self.begin(builder, now)
        self.move(now)
        return now

    def ready_at(self, now: float) -> float:
        """Return when the next batch is there, where the trainer begins to wait now."""
        while self.events and self.events[0][0] <= now:
            self.finish()
        self.schedule.is_waited_for = True
        self.move(now)
        while not self.schedule.has_next:
            if self.events and self.events[0][0] <= now + CHECK_S:
                now = max(now, self.finish())
            else:
                now += CHECK_S
                self.move(now)
        self.schedule.is_waited_for = False
        return now


def run_dispatched(batches: list[list[float]], shares: list[int], step_s: float, deaths: float, seed: int) -> Any:
    """Return the share of time that trainers wait, builders that died, and batches that were built twice."""
    draw = random.Random(seed)
    ranks = [Rank(costs, share, draw) for costs, share in zip(batches, shares, strict=True)]
    for rank in ranks:
        rank.move(0.0)
    now, waited, num_dead = 60.0, 0.0, 0  # builders have had a minute before the first step
    joining: list[tuple[float, int]] = []
    for _ in range(len(batches[0])):
        while joining and joining[0][0] <= now:
            _, number = heapq.heappop(joining)
            ranks[number].join(ranks[number].newest)
            ranks[number].newest += 1
        ready = max(rank.ready_at(now) for rank in ranks)
        waited += ready - now
        for number, rank in enumerate(ranks):
            while rank.events and rank.events[0][0] <= ready:
                rank.finish()
            rank.schedule.take(ready)
            for builder in [each for each in rank.queues if draw.random() < deaths * (ready - now + step_s) / 3600]:
                rank.lose(builder)
                num_dead += 1
                heapq.heappush(joining, (ready + REPLACED_S, number))
            rank.move(ready)
        now = ready + step_s
    return waited / (now - 60.0), num_dead, sum(rank.schedule.num_twice for rank in ranks)


def run_in_order(batches: list[list[float]], shares: list[int], step_s: float) -> float:
    """Return the share of time that trainers wait when workers take turns."""
    done: list[list[float]] = [[] for _ in batches]
    taken: list[float] = []
    now, waited = 60.0, 0.0
    for number in range(len(batches[0])):
        ready = now
        for rank, (costs, share) in enumerate(zip(batches, shares, strict=True)):
            while len(done[rank]) < min(number + AHEAD * share, len(costs)):  # all that may be begun by now
                at = len(done[rank])
                free = done[rank][at - share] if at >= share else 0.0
                asked = taken[at - AHEAD * share] if at >= AHEAD * share else 0.0
                done[rank].append(max(free, asked) + costs[at])
            ready = max(ready, done[rank][number])
        waited += ready - now
        taken.append(ready)
        now = ready + step_s
    return waited / (now - 60.0)


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--builders", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--busy", type=float, default=0.8)
    parser.add_argument("--deaths", type=float, default=0.01)
    parser.add_argument("--measured", type=int, default=120, help="samples that are built to learn what they take")
    args = parser.parse_args()
    samples = measure(args.measured)
    draw = random.Random(0)
    batches = [[sum(draw.choices(samples, k=SAMPLES)) for _ in range(args.steps)] for _ in range(args.ranks)]
    every = [cost for costs in batches for cost in costs]
    least, more = divmod(args.builders, args.ranks)
    shares = [least + (rank < more) for rank in range(args.ranks)]
    step_s = statistics.fmean(every) / least / args.busy
    every.sort()
    print(
        f"samples: median {statistics.median(samples) * 1000:.0f} ms, longest {max(samples):.1f} s; batches: median "
        f"{statistics.median(every):.2f} s, 99 % {every[int(len(every) * 0.99)]:.2f} s, longest {every[-1]:.2f} s; "
        f"a step takes {step_s:.2f} s"
    )
    share, num_dead, num_twice = run_dispatched(batches, shares, step_s, args.deaths, seed=1)
    in_order = run_in_order(batches, shares, step_s)
    print(
        f"{args.ranks} ranks, {args.builders} builders, {args.steps} steps: trainers wait {share:.1%} of their time "
        f"({num_dead} builders died, {num_twice} of {len(every)} batches were built twice), in order {in_order:.1%}"
    )


if __name__ == "__main__":
    main()
