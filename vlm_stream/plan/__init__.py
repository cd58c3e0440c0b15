"""The plan: what every rank consumes next, as arithmetic on index columns.

Enters: shard sizes, index columns on demand, a frozen config, the shape of a step, maybe a state. Leaves: steps,
reports, answers to "where is this sample". It must not know files, tensors, clocks or processes; numpy is all it
imports.

In the order in which data meets them: `values` (the seam), `randomness`, `order` (one source's permutation),
`live_columns` and `samples` (its columns), `mixture` (which source next), `fit`, `pack`, `group`, `units` (a window's
samples -> units), `costs`, `model_costs`, `window` (the unit stream), `queue` (units not yet dealt), `balance` and
`deal` (who gets which), `steps`, `state` and `check` (resuming), `config`, `planner`; then `report` (`lower_bound`,
`requests`) and `query`.
"""

from __future__ import annotations

from vlm_stream.plan.balance import BalanceConfig
from vlm_stream.plan.check import OVERRIDES
from vlm_stream.plan.config import PlanConfig
from vlm_stream.plan.costs import CostConfig
from vlm_stream.plan.group import GroupConfig, PlainConfig
from vlm_stream.plan.mixture import MixtureConfig
from vlm_stream.plan.model_costs import costs_of_model
from vlm_stream.plan.order import OrderConfig
from vlm_stream.plan.pack import PackConfig
from vlm_stream.plan.planner import Count, Planner
from vlm_stream.plan.query import PlannedSample, find_sample, samples_of_step, state_before_step, step_at
from vlm_stream.plan.report import PlanReport, plan_report
from vlm_stream.plan.state import read_state
from vlm_stream.plan.steps import Step
from vlm_stream.plan.values import ColumnReader, Dropped, Ref, SampleColumns, SourceSpec, StepShape, Unit

__all__ = [
    "OVERRIDES",
    "BalanceConfig",
    "ColumnReader",
    "CostConfig",
    "Count",
    "Dropped",
    "GroupConfig",
    "MixtureConfig",
    "OrderConfig",
    "PackConfig",
    "PlainConfig",
    "PlanConfig",
    "PlanReport",
    "PlannedSample",
    "Planner",
    "Ref",
    "SampleColumns",
    "SourceSpec",
    "Step",
    "StepShape",
    "Unit",
    "costs_of_model",
    "find_sample",
    "plan_report",
    "read_state",
    "samples_of_step",
    "state_before_step",
    "step_at",
]
