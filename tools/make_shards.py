#!/usr/bin/env python3
"""Turn a meta file, a JSON array or JSON lines into indexed WebDataset shards, from a checkout.

    python tools/make_shards.py META_OR_JSON OUT [options]

The same as `vlm-stream make-shards`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_stream.commands import make_shards
from vlm_stream.commands.common import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script(make_shards))
