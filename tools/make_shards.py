#!/usr/bin/env python3
"""Turn a meta file, a JSON array or JSON lines into indexed WebDataset shards, from a checkout.

    python tools/make_shards.py META_OR_JSON OUT [options]

The same as `vlm-stream make-shards`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_stream.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("make-shards", sys.argv[1:], prog="make_shards.py"))
