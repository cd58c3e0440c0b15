"""`vlm_stream.json` in the folder of a checkpoint: what `loader.state_dict()` returned."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from vlm_stream.errors import StateError

__all__ = ["STATE_FILE", "read_state", "write_state"]

STATE_FILE: Final = "vlm_stream.json"


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, so that there is all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{STATE_FILE}-", delete=False) as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(folder / STATE_FILE)


def read_state(folder: Path, *, may_be_missing: bool = False) -> dict[str, Any] | None:
    """Read the state; None if there is none and there may be none."""
    path = folder / STATE_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if may_be_missing:
            return None
        raise StateError(
            f"the checkpoint {folder} has no {STATE_FILE}, so nobody knows which samples it was trained on, and "
            f"resuming would repeat some of them; resume from a checkpoint that was trained from a StreamLoader, or "
            f"pass ignore_data_skip=True to begin with the first sample again"
        ) from None
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{path} is no JSON object ({error}), so the position in the data is lost; resume from an older checkpoint"
        ) from error
