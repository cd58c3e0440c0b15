"""`PositionRule`: the multi-axis positions (temporal, height, width) of a sample, from a config alone.

Enters: a model config (or its `config.json` as a mapping) and encoded samples. Leaves: `[3, length]` positions equal to
what the model's own `get_rope_index` returns. No weights are needed, so loader workers can compute them.

The rule: text counts on by one on all axes. A medium of T x H x W merged patches starts where the text before it ended;
its tokens take that start plus their own t, h and w; the text after it goes on at start + max(H, W). Families differ in
what a video is: one medium, whose t may be scaled by seconds, or one medium per frame with text between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.packs.keys import token_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.packs.keys import Sample

__all__ = ["PositionRule"]

_IMAGE: Final = 1
_VIDEO: Final = 2
_CLIP_FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
_FRAME_FAMILIES: Final = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRule:
    """Multi-axis positions of one family; call it with an encoded sample."""

    merge_size: int
    """Patches along one side that become one token."""
    frames_apart: bool
    """Whether a video is one medium per temporal patch, with text between them."""
    tokens_per_second: float | None = None
    """What scales the temporal axis of videos, together with the seconds per temporal patch; None: it is not scaled."""
    image_token_id: int | None = None
    """Finds images where a sample has no `mm_token_type_ids`."""
    video_token_id: int | None = None
    """Finds videos where a sample has no `mm_token_type_ids`."""

    def __post_init__(self) -> None:
        """Refuse a merge size that means nothing."""
        if self.merge_size < 1:
            raise ConfigError(f"merge_size is {self.merge_size}, so no positions follow from it; give at least 1.")

    @classmethod
    def from_config(cls, config: Any) -> PositionRule | None:
        """Read the rule from a model config.

        Args:
            config: A transformers config object, or the contents of its `config.json`.

        Returns:
            The rule, or None for a family whose positions count on by one whatever the tokens are.

        Raises:
            ConfigError: The family has multi-axis positions by a rule that is not written down here.
        """
        family = str(_read(config, "model_type", default=""))
        text, vision = _read(config, "text_config", default=config), _read(config, "vision_config", default=None)
        if family in (*_CLIP_FAMILIES, *_FRAME_FAMILIES):
            seconds = _read(vision, "tokens_per_second", default=None) if family == "qwen2_5_vl" else None
            ids = {name: _read(config, name, default=None) for name in ("image_token_id", "video_token_id")}
            merge = int(_read(vision, "spatial_merge_size", default=2))
            return cls(merge_size=merge, frames_apart=family in _FRAME_FAMILIES, tokens_per_second=seconds, **ids)
        ropes = [_read(text, name, default=None) or {} for name in ("rope_parameters", "rope_scaling")]
        if any("mrope_section" in rope for rope in ropes):
            raise ConfigError(
                f"The family {family!r} has multi-axis positions (mrope_section) by a rule that is not known here; "
                f"packing with plain positions would train another model. Pass "
                f"ModelPositions(model.model.get_rope_index) instead."
            )
        return None

    @classmethod
    def from_processor(cls, processor: Any, *, tokens_per_second: float = 2.0) -> PositionRule | None:
        """Read the rule from a processor, where no model config is at hand.

        Args:
            processor: A transformers processor.
            tokens_per_second: What the processor does not know; 2 in the published Qwen2.5-VL checkpoints.

        Returns:
            The rule, or None for a processor of another family than those with a rule here.
        """
        name = type(processor).__name__.removesuffix("Processor").lower().replace("_", "")
        families = {family.replace("_", ""): family for family in (*_CLIP_FAMILIES, *_FRAME_FAMILIES)}
        if name not in families:
            return None
        family = families[name]
        return cls(
            merge_size=int(processor.image_processor.merge_size),
            frames_apart=family in _FRAME_FAMILIES,
            tokens_per_second=tokens_per_second if family == "qwen2_5_vl" else None,
            image_token_id=getattr(processor, "image_token_id", None),
            video_token_id=getattr(processor, "video_token_id", None),
        )

    def __call__(self, sample: Sample) -> torch.Tensor:
        """Return the positions `[3, length]` of an encoded sample; 0 where its attention mask is 0."""
        ids = token_row(sample, "input_ids")
        assert ids is not None  # noqa: S101 - an encoded sample without tokens does not exist
        types, mask = self._types(sample, ids), token_row(sample, "attention_mask")
        visible = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        positions = torch.zeros(3, len(ids), dtype=torch.long)
        positions[:, visible] = self._walk(types[visible], self._media(sample))
        return positions

    def _types(self, sample: Sample, ids: torch.Tensor) -> torch.Tensor:
        types = token_row(sample, "mm_token_type_ids")
        if types is not None:
            return types
        types = torch.zeros_like(ids)
        for kind, token_id in ((_IMAGE, self.image_token_id), (_VIDEO, self.video_token_id)):
            if token_id is not None:
                types[ids == token_id] = kind
        return types

    def _media(self, sample: Sample) -> dict[int, Iterator[torch.Tensor]]:
        """Return for each kind the positions of its media, each `[3, tokens]` from zero."""
        images, videos = sample.get("image_grid_thw"), sample.get("video_grid_thw")
        if videos is not None and self.frames_apart:
            videos = torch.repeat_interleave(videos, videos[:, 0], dim=0)
            videos[:, 0] = 1
        num_videos = 0 if videos is None else len(videos)
        seconds = sample.get("second_per_grid_ts")
        intervals: list[Any] = [1] * num_videos
        if self.tokens_per_second is not None:
            intervals = [self.tokens_per_second * s for s in ([1] * num_videos if seconds is None else seconds)]
        return {
            _IMAGE: (self._grid(grid, 1) for grid in (() if images is None else images)),
            _VIDEO: (self._grid(g, step) for g, step in zip(() if videos is None else videos, intervals, strict=True)),
        }

    def _grid(self, grid: torch.Tensor, interval: Any) -> torch.Tensor:
        t, h, w = (int(n) for n in grid)
        times = (torch.arange(t) * interval).long()
        axes = torch.meshgrid(
            times, torch.arange(h // self.merge_size), torch.arange(w // self.merge_size), indexing="ij"
        )
        return torch.stack(axes).reshape(3, -1)

    def _walk(self, types: torch.Tensor, media: dict[int, Iterator[torch.Tensor]]) -> torch.Tensor:
        """Return `[3, len(types)]`: runs of text count on, runs of media tokens consume the grids of their kind."""
        kinds, lengths = torch.unique_consecutive(types, return_counts=True)
        parts: list[torch.Tensor] = []
        start = 0
        for kind, length in zip(kinds.tolist(), lengths.tolist(), strict=True):
            if kind == 0:
                parts.append(torch.arange(start, start + length).expand(3, -1))
                start += length
            while kind != 0 and length > 0:  # media that touch each other are one run of several grids
                grid = next(media[kind], None)
                if grid is None or grid.shape[1] > length:
                    raise BadSampleError("encode", "media_tokens_mismatch", _mismatch(kind, length, grid))
                parts.append(grid + start)
                length -= grid.shape[1]
                start += int(grid[1:].max()) + 1
        return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.long)


def _mismatch(kind: int, length: int, grid: torch.Tensor | None) -> str:
    what = "image" if kind == _IMAGE else "video"
    owner = f"no {what} grid is left for them" if grid is None else f"the next {what} grid stands for {grid.shape[1]}"
    return f"{length} {what} tokens in a row, and {owner}: tokens and media of the sample do not belong together."


def _read(config: Any, name: str, *, default: Any) -> Any:
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
