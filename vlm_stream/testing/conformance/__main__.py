"""One process of a launch: `python -m vlm_stream.testing.conformance PACKAGE.MODULE:FUNCTION RUN.json`."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

import vlm_stream.testing  # noqa: F401  # torchvision can be imported from here on
from vlm_stream.testing.conformance.run import Run


def main(function: str, path: str) -> None:
    """Import the function and run it."""
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(Run.from_file(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
