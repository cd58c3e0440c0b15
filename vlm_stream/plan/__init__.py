"""The plan: what every rank consumes next, as arithmetic on index columns.

Enters: shard sizes, index columns on demand, a frozen config, the shape of a step, maybe a state. Leaves: steps,
reports, answers to "where is this sample". It must not know files, tensors, clocks or processes; numpy is all it
imports.

The path of a sample, and the files that it meets:

    order -> mixture -> window -> packs or groups -> steps -> ranks

- `values`: what enters and leaves, and the config.
- order: `order` (one source's permutation, keyed by `randomness`, and its columns while they are live), `foresight`
  (when each shard will be read).
- mixture: `mixture` (which source is drawn next).
- window: `window` (a few thousand draws, cut together into the next units of the stream).
- packs or groups: `units`.
- steps: `queue` (units not yet assigned, and the cursor), `steps` (what is consumed between two updates).
- ranks: `balance` (what units cost, who gets which).
- `state` (the cursor as JSON), `resume` (does it fit this plan), `planner` (all of it together), `report` (what it will
  do, and where a sample is).

A cursor is where the plan stands, as values; a state is its JSON with what proves that it fits.
"""

from vlm_stream.plan.balance import costs_of_model
from vlm_stream.plan.foresight import ShardUses, shard_uses
from vlm_stream.plan.planner import Count, Planner
from vlm_stream.plan.randomness import Key, mix64, words
from vlm_stream.plan.report import PlannedSample, PlanReport, find_samples, plan_report, samples_of_step, step_at
from vlm_stream.plan.resume import OVERRIDES
from vlm_stream.plan.state import read_state
from vlm_stream.plan.steps import Step
from vlm_stream.plan.units import best_fit_decreasing, permute_chunks
from vlm_stream.plan.values import (
    BalanceConfig,
    ColumnReader,
    CostConfig,
    Countable,
    Dropped,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    Ref,
    SampleColumns,
    SourceSpec,
    StepShape,
)
