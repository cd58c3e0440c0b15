"""Who iterates: a trainer without its plug would be told only by what it trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["refuse_bare_lightning"]

_FRAMES: Final = 4
"""How far above its look at a loader a Lightning trainer is."""


def refuse_bare_lightning(caller: FrameType | None) -> None:
    """Refuse a Lightning trainer without `StreamCallback`: it saves and loads the place of a training loader wrongly.

    Args:
        caller: The frame in which a loader is iterated.

    Raises:
        ConfigError: It is Lightning's, and the trainer has no such callback.
    """
    if caller is None or not caller.f_globals.get("__name__", "").endswith(".connectors.data_connector"):
        return
    frame: FrameType | None = caller
    for _ in range(_FRAMES):
        if frame is None:
            return
        callbacks = getattr(frame.f_locals.get("trainer"), "callbacks", None)
        if callbacks is None:
            frame = frame.f_back
            continue
        if any(type(callback).__name__ == "StreamCallback" for callback in callbacks):
            return
        raise ConfigError(
            "Lightning trains on this StreamLoader without its plug: it would save the place of a batch that it has "
            "not trained on and start the first epoch again where it resumes; pass "
            "Trainer(callbacks=[vlm_stream.integrations.lightning.StreamCallback()]), or install this package, so "
            "that Lightning finds it"
        )
