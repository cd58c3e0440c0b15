"""A twin of one part of a processor: it resizes as the original does and stops before rescaling and normalising.

Enters: an image or video processor of transformers (torchvision backend). Leaves: an object of a subclass that shares
the original's settings, whatever they are set to later; and a note of what it left undone, taken from the arguments of
the step itself. So no parameter is written down twice, and options of a single call count as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from vlm_stream.pixels.rgb_view import view_frames, view_image
from vlm_stream.pixels.spec import PartSpec

__all__ = ["PartTwin", "Undone", "make_twin"]

_CHANNELS: Final = 3


@dataclass(slots=True)
class Undone:
    """What the last call of a twin left undone."""

    spec: PartSpec | None = None


class PartTwin:
    """Steps that replace those of the original; mixed in before its class."""

    _undone: Undone
    _layout: Literal["patches", "planes"] = "planes"

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """View the image's memory; what is no RGB image goes the original's way."""
        if getattr(image, "mode", None) == "RGB" and hasattr(image, "tobytes"):
            return view_image(image)
        converted: torch.Tensor = super().process_image(image, *args, **kwargs)  # type: ignore[misc]
        return converted

    def _prepare_input_videos(self, videos: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        views = [view_frames(video) for video in videos]
        if all(view is not None for view in views):
            return [view for view in views if view is not None]
        prepared: list[torch.Tensor] = super()._prepare_input_videos(videos, *args, **kwargs)  # type: ignore[misc]
        return prepared

    def rescale_and_normalize(
        self,
        images: torch.Tensor,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
    ) -> torch.Tensor:
        """Leave the bytes as they are, without the fourth channel of views, and note what was to be done."""
        # Computed as the original computes it, in float32: finished pixels then come out the same.
        unit = 1.0 / rescale_factor if do_rescale else 1.0
        mean = torch.tensor(_per_channel(image_mean) if do_normalize else (0.0,) * _CHANNELS) * unit
        std = torch.tensor(_per_channel(image_std) if do_normalize else (1.0,) * _CHANNELS) * unit
        self._undone.spec = PartSpec(layout=self._layout, repeat=1, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
        colours = images[..., :_CHANNELS, :, :]
        return colours if self._layout == "patches" else colours.contiguous()


def make_twin(part: Any, mixin: type[PartTwin], undone: Undone) -> Any:
    """Return the twin of a part; `undone` is kept up to date by its calls."""
    kind = type(f"Compact{type(part).__name__}", (mixin, type(part)), {"_undone": undone})
    twin: Any = object.__new__(kind)
    twin.__dict__ = part.__dict__  # shared: a setting that is changed later holds for both
    return twin


def _per_channel(value: Any) -> tuple[float, ...]:
    return (float(value),) * _CHANNELS if isinstance(value, (int, float)) else tuple(float(one) for one in value)
