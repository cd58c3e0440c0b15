"""Read back what the hooks of `record.py` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Records"]

Keys = dict[str, str]
"""Of one batch: a digest for each key."""


@dataclass(frozen=True, slots=True)
class Records:
    """What the ranks of one launch were given, by rank."""

    train: dict[int, list[Keys]]
    """Batches of the forwards in training mode."""
    evaluated: dict[int, list[Keys]]
    """Those in eval mode."""
    rates: dict[int, list[float]]
    """Learning rates of the optimizer steps."""
    told: dict[int, dict[str, float | None]]
    """What the trainer told with `run.tell`."""
    worlds: set[int]
    """Sizes of the world as the processes saw it at training forwards."""
    gradients: dict[int, dict[str, Any]]
    """Of the first optimizer step, by name of the parameter."""

    @classmethod
    def read(cls, folder: Path) -> Records:
        """Read the records of a launch."""
        import torch

        found = cls(train={}, evaluated={}, rates={}, told={}, worlds=set(), gradients={})
        for path in sorted(folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                found._add(json.loads(line))
        for path in folder.glob("gradients-*.pt"):
            found.gradients[int(path.stem.split("-")[1])] = torch.load(path, weights_only=True)
        return found

    def _add(self, line: dict[str, Any]) -> None:
        rank = line["rank"]
        if line["kind"] == "train":
            self.train.setdefault(rank, []).append(line["keys"])
            self.worlds.add(line["world"])
        elif line["kind"] == "eval":
            self.evaluated.setdefault(rank, []).append(line["keys"])
        elif line["kind"] == "step":
            self.rates.setdefault(rank, []).append(line["lr"])
        else:
            self.told.setdefault(rank, {}).update(line["facts"])
