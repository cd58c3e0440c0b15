"""One process of a launch: `python -m vlm_stream.testing.conformance PACKAGE.MODULE:FUNCTION RUN.json`."""

import sys
import time
from importlib import import_module
from typing import Any

import torch
import torch.distributed

import vlm_stream.testing  # noqa: F401  # torchvision can be imported from here on
from vlm_stream.testing.conformance.run import Run


def main(function: str, path: str) -> None:
    """Import the function and run it."""
    torch.set_num_threads(1)
    _end_groups_gently()
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(Run.from_file(path))


def _end_groups_gently() -> None:
    """Give gloo's threads time to let go of their tensors before a process group ends.

    They need the interpreter's lock for it, and the end of the group waits for them without giving it away.
    """
    end = torch.distributed.destroy_process_group

    def wait_and_end(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        end(*args, **kwargs)

    torch.distributed.destroy_process_group = wait_and_end


if __name__ == "__main__":
    main(*sys.argv[1:])
