"""plan: the dry run, from the index alone. How full packs get, how many steps, how even the ranks, how many builders.

Core-seconds are counted with the costs that 'bench --save-costs' has measured, or with guesses of the right order.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError
from vlm_stream.schema import human_bytes

if TYPE_CHECKING:
    from vlm_stream.blueprint import Piece
    from vlm_stream.plan import PlannedSample, PlanReport

EXAMPLES: Final = """\
examples:
  plan shards/ --pack-size 8192 --world 64 --micro-batches 4
  plan s3://bucket/data --pack-size 8192 --world 64 --sweep window=1024,4096,65536
  plan --config recipe.yaml --max-steps 200 --json
  plan recipe.yaml --world 64 --costs costs.json --step-seconds 3.5
"""
BUSY: Final = 0.8
"""How busy builders are meant to be: batches are uneven."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_stream_arguments(parser)
    parser.add_argument(
        "--max-steps",
        type=arguments.parse_count,
        metavar="N",
        help="look at the first N steps (default: an epoch)",
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=A,B", help="one column for each value of an option"
    )
    parser.add_argument("--costs", metavar="FILE", help="of building, written by bench --save-costs (default: guesses)")
    parser.add_argument(
        "--step-seconds", type=float, metavar="T", help="how long the trainer takes for a step: how many builders then"
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan once for each column and print the table."""
    given = arguments.loader_arguments(args)
    columns = _columns(args.sweep)
    reports = {title: _report(given | changes, args) for title, changes in columns.items()}
    if args.json:
        plain = {
            title: report.to_dict() | {"entries": entries.to_dict(), **building.to_dict(report)}
            for title, (report, entries, building) in reports.items()
        }
        output.print_json(plain if args.sweep else next(iter(plain.values())))
    else:
        _print(
            {
                title: _rows(report) | building.rows(report) | entries.rows()
                for title, (report, entries, building) in reports.items()
            }
        )
    empty = [_is_empty(title, report) for title, (report, _, _) in reports.items()]  # each of them says so
    return int(any(empty))


def _is_empty(title: str, report: PlanReport) -> bool:
    """Tell whether nothing is left to train on, and say so."""
    if not report.samples:
        of = f"; {title}" if title != "plan" else ""
        sys.stderr.write(
            f"error: no sample is left to train on ({_dropped(report)}{of}); raise pack_size or max_length, or make "
            f"images smaller\n"
        )
    return not report.samples


def _dropped(report: PlanReport) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items()) or "none"


class _Building:
    """Adds up what building takes, over the samples whose requests are counted."""

    def __init__(self, costs: str | None, step_s: float | None) -> None:
        from vlm_stream.dispatch import CostModel

        self._model = CostModel() if costs is None else CostModel.from_dict(_read_json(costs))
        self._costs, self._step_s = costs, step_s
        self._num_samples, self._seconds = 0, 0.0
        if step_s is not None and not step_s > 0:
            raise ConfigError(
                f"--step-seconds is {step_s:g}, and no number of builders is enough for that; give seconds"
            )

    def add(self, pieces: Sequence[Piece], tokens: int) -> None:
        from vlm_stream.planning import work_of

        self._num_samples += len(pieces)
        self._seconds += self._model.core_seconds(work_of(pieces, tokens))

    def to_dict(self, report: PlanReport) -> dict[str, float | int]:
        """Return core-seconds of one step over all ranks, and the builders that it takes."""
        per_step = self._seconds / max(self._num_samples, 1) * report.samples / max(report.steps, 1)
        found: dict[str, float | int] = {"core_seconds_per_step": per_step}
        if self._step_s is not None:
            found["builders"] = max(math.ceil(per_step / self._step_s / BUSY), 1)
        return found

    def rows(self, report: PlanReport) -> dict[str, str]:
        """Return the lines of the table."""
        found = self.to_dict(report)
        source = "measured" if self._costs else "a guess; measure it: bench --save-costs FILE, then --costs FILE"
        rows = {"core-seconds per step": f"{found['core_seconds_per_step']:,.2f} ({source})"}
        if self._step_s is not None:
            rows[f"builders for steps of {self._step_s:g} s"] = f"{found['builders']:,} over all ranks, {BUSY:.0%} busy"
        return rows


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the costs in {path} cannot be read ({error}); write them with: vlm-stream bench ... --save-costs {path}"
        ) from error


class _Entries:
    """Adds up what is drawn from each entry of each source, over the samples whose requests are counted."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Counter[str]] = {}

    def add(self, source: str, piece: Piece, tokens: int) -> None:
        sums = self._sums.setdefault((source, piece.entry), Counter())
        sizes = piece.sizes
        media = {"images": len(sizes.images), "videos": len(sizes.videos), "audios": len(sizes.audios)}
        sums.update(samples=1, tokens=tokens, **media)

    def to_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return sums and shares by source and entry."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (source, entry), sums in sorted(self._sums.items()):
            shares = {f"{name}_share": sums[name] / max(self._total(name), 1) for name in ("samples", "tokens")}
            found.setdefault(source, {})[entry] = {**sums, **shares}
        return found

    def _total(self, name: str) -> int:
        return sum(sums[name] for sums in self._sums.values())

    def rows(self) -> dict[str, str]:
        """Return a line of the table for each entry; sources are named where there are several."""
        several = len({source for source, _ in self._sums}) > 1
        return {
            f"from {f'{source}, ' if several and not source.endswith(f':{entry}') else ''}{entry}": (
                f"{sums['samples'] / self._total('samples'):.1%} of samples, "
                f"{sums['tokens'] / max(self._total('tokens'), 1):.1%} of tokens, "
                f"{sums['images']:,} images, {sums['videos']:,} videos, {sums['audios']:,} audios"
            )
            for (source, entry), sums in sorted(self._sums.items())
        }


def _columns(sweeps: list[str]) -> dict[str, dict[str, Any]]:
    import yaml

    columns: dict[str, dict[str, Any]] = {"plan": {}}
    for sweep in sweeps:
        name, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ConfigError(f"'--sweep {sweep}' names no values, so there is nothing to compare; write NAME=A,B,C")
        key = name.strip().replace("-", "_")
        columns = {
            f"{'' if title == 'plan' else title + ' '}{key}={value}": changes | {key: yaml.safe_load(value)}
            for title, changes in columns.items()
            for value in values.split(",")
        }
    return columns


def _report(given: dict[str, Any], args: argparse.Namespace) -> tuple[PlanReport, _Entries, _Building]:
    from vlm_stream.plan import plan_report
    from vlm_stream.storage import plan_requests

    plan, options = arguments.open_plan(given)
    if args.max_steps is None and options.epochs is None:
        raise ConfigError("the plan has no end (epochs is null), so it cannot be added up; give --max-steps")

    entries, building = _Entries(), _Building(args.costs, args.step_seconds)

    def count_requests(samples: Sequence[PlannedSample]) -> tuple[int, int]:
        found = plan.pieces([sample.ref for sample in samples])
        for sample, piece in zip(samples, found, strict=True):
            entries.add(plan.datasets.sources[sample.ref.source].name, piece, sample.tokens)
        building.add(found, sum(sample.tokens for sample in samples))
        requests = plan_requests([span for piece in found for span in (*piece.reads, *piece.text)], options.read())
        tables = plan.table_sizes([sample.ref for sample in samples])
        return len(requests) + len(tables), sum(request.size for request in requests) + sum(tables)

    shape = options.shape(args.world or 1)
    report = plan_report(plan.planner, shape, max_steps=args.max_steps, count_requests=count_requests)
    return report, entries, building


def _print(columns: dict[str, dict[str, str]]) -> None:
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    output.print_columns(
        ["", *columns], *([name, *(rows.get(name, "") for rows in columns.values())] for name in names)
    )


def _rows(report: PlanReport) -> dict[str, str]:
    mixture = ", ".join(
        f"{name} {count / max(report.tokens, 1):.1%}" for name, count in report.tokens_by_source.items()
    )
    uneven = report.decode_imbalance_step
    decoding = {} if uneven is None else {"video decoding max/mean, step": f"{uneven:.3f}"}
    return {
        "samples": f"{report.samples:,}",
        "tokens": f"{report.tokens:,}",
        "tokens by source": mixture,
        "dropped": _dropped(report),
        "units (lower bound)": f"{report.packs:,} ({report.packs_lower_bound:,})",
        "fill / padding": f"{report.fill:.2%} / {report.padding:.2%}",
        "steps" if report.complete else "steps looked at": f"{report.steps:,}",
        "steps per epoch": f"{report.steps_per_epoch:,.1f}",
        "LLM max/mean, step / micro": f"{report.llm_imbalance_step:.3f} / {report.llm_imbalance_micro:.3f}",
        "ViT max/mean, step / micro": f"{report.vit_imbalance_step:.3f} / {report.vit_imbalance_micro:.3f}",
        **decoding,
        "live shards": f"{report.live_shards:.0f}",
        "variance inflation": f"{report.variance_inflation:.2f}",
        "requests per sample": f"{report.requests_per_sample or 0:.2f}",
        "bytes per step": human_bytes(report.bytes_per_step or 0),
        "state": human_bytes(report.state_bytes),
    }
