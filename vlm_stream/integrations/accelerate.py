"""accelerate on a `StreamLoader`: a loop of one's own, whose `save_state` and `load_state` hold the position.

    from vlm_stream.integrations.accelerate import register

    register(accelerator, loader)

`accelerator.prepare` leaves a `StreamLoader` as it is, so it may be given to it or not. Batches are one rank's share,
and are on the CPU unless the loader has a `device`.
"""

from typing import Any

from vlm_stream.errors import MissingExtraError
from vlm_stream.integrations.trainer_checks import check_accumulation, check_ranks
from vlm_stream.loader import StreamLoader

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingExtraError("accelerate", "trainers", "vlm_stream.integrations.accelerate") from error

__all__ = ["loss_scale", "register"]


def register(accelerator: Accelerator, loader: StreamLoader) -> StreamLoader:
    """Save and load the loader's position with the accelerator's state; refuse steps that are not the loader's.

    Returns:
        The loader.

    Raises:
        ConfigError: It accumulates another number of batches than the loader plans for a step, or it has other ranks.
    """
    if loader.options.train:
        check_accumulation("the accelerator", accelerator.gradient_accumulation_steps, loader)
    check_ranks("the accelerator", accelerator.num_processes // _model_parallel_size(accelerator), loader)
    accelerator.register_for_checkpointing(loader)
    return loader


def loss_scale(accelerator: Accelerator, loader: StreamLoader) -> int:
    """Return what a loss is multiplied by that was divided by the labels of its whole step (`num_items_in_batch`).

    `accelerator.backward` divides it by the micro-batches of a step, and DDP its gradients by the ranks.

    >>> accelerator.backward(loss * loss_scale(accelerator, loader))  # doctest: +SKIP
    """
    return int(accelerator.gradient_accumulation_steps * loader.world.size)


def _model_parallel_size(accelerator: Any) -> int:
    config = getattr(accelerator, "parallelism_config", None)
    return 1 if config is None else int(config.tp_size * config.cp_size)
