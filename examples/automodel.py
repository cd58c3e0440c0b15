"""NeMo Automodel's VLM recipe over our shards, from Python: what its command `automodel` does with `automodel.yaml`.

SHARDS=... VALIDATION_SHARDS=... MODEL=... torchrun --nproc-per-node 8 examples/automodel.py [--section.key VALUE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONFIG = Path(__file__).with_suffix(".yaml")


def train(changes: Sequence[str], *, before: Callable[[Any], None] | None = None) -> Any:
    """Set up the recipe with changes of its YAML ("--section.key", "value", ...), train, and return it."""
    recipe = FinetuneRecipeForVLM(parse_args_and_load_config(str(CONFIG), list(changes)))
    recipe.setup()
    if before is not None:
        before(recipe)
    recipe.run_train_validation_loop()
    return recipe


if __name__ == "__main__":
    train(sys.argv[1:])
