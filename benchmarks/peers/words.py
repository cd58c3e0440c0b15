"""What stands beside the numbers: one line for each result, and which rows the README shows."""

from __future__ import annotations

__all__ = ["EXPLANATIONS", "README_ROWS"]

EXPLANATIONS: list[str] = []

README_ROWS: dict[str, str] = {}
