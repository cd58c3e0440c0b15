"""Multi-axis positions (temporal, height, width) of a sample: from a config alone, or through a model's own method.

Enters: a model config (or its `config.json` as a mapping), or a bound `get_rope_index`; encoded samples. Leaves:
`[3, length]` positions. `PositionRule` needs no weights and no model code, so loader workers can compute them; it gives
what the model's own `get_rope_index` returns.

The rule: text counts on by one on all axes. A medium of T x H x W merged patches starts where the text before it ended;
its tokens take that start plus their own t, h and w; the text after it goes on at start + max(H, W). Families differ in
what a video is: one medium, whose t may be scaled by seconds, or one medium per frame with text between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import pad

from vlm_stream.collate.rows import token_row
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.keys import POSITIONS_KEY, TOKEN_KEYS, Sample

_IMAGE: Final = 1
_VIDEO: Final = 2
_CLIP_RULE_SINCE: Final = (5, 18)
_CLIP_FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
_FRAME_FAMILIES: Final = (
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
)
_UNRULED_FAMILIES: Final = (
    "ernie4_5_vl_moe",
    "glm_image",
    "hunyuan_vl",
    "minicpmv4_7",
)
"""Families with multi-axis positions of other kinds: their processors must not be taken for plain ones."""
_OMNI_FAMILIES: Final = {"qwen25omni": "Qwen2_5Omni", "qwen3omnimoe": "Qwen3OmniMoe"}
"""Families whose rule the model's class knows, and whose processors tell all that it asks of a config."""


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
        if self.merge_size < 1:
            raise ConfigError(f"merge_size is {self.merge_size}, so no positions follow from it; give at least 1.")

    @classmethod
    def from_config(cls, config: Any) -> PositionRule | WeightlessPositions | None:
        """Read the rule from a model config.

        Args:
            config: A transformers config object, or the contents of its `config.json`.

        Returns:
            The rule; the model class's own method, without weights, where the family or the installed transformers
            follows another rule than those here; None for families whose positions count on by one.

        Raises:
            ConfigError: The family has multi-axis positions, and neither a rule nor a class of it is known.
        """
        family = str(_read(config, "model_type", default=""))
        text, vision = _read(config, "text_config", default=config), _read(config, "vision_config", default=None)
        if family in _FRAME_FAMILIES or (family in _CLIP_FAMILIES and _clip_rule_is_installed()):
            # 4 is what transformers assumes where a config.json does not say.
            seconds = _read(vision, "tokens_per_second", default=4) if family == "qwen2_5_vl" else None
            ids = {name: _read(config, name, default=None) for name in ("image_token_id", "video_token_id")}
            merge = int(_read(vision, "spatial_merge_size", default=2))
            return cls(merge_size=merge, frames_apart=family in _FRAME_FAMILIES, tokens_per_second=seconds, **ids)
        ropes = [_read(text, name, default=None) or {} for name in ("rope_parameters", "rope_scaling")]
        if family in _CLIP_FAMILIES or any("mrope_section" in rope for rope in ropes):
            own = WeightlessPositions.find(config)
            if own is not None:
                return own
            raise ConfigError(
                f"The family {family!r} has multi-axis positions (mrope_section) by a rule that is not known here; "
                f"packing with plain positions would train another model. Pass "
                f"ModelPositions(model.model.get_rope_index) instead."
            )
        return None

    @classmethod
    def from_processor(
        cls, processor: Any, *, tokens_per_second: float = 2.0
    ) -> PositionRule | WeightlessPositions | None:
        """Read the rule from a processor, where no model config is at hand.

        Args:
            processor: A transformers processor.
            tokens_per_second: What the processor does not know; 2 in the published Qwen2.5-VL checkpoints.

        Returns:
            The rule, that of the model's class for Qwen-Omni, or None for a family whose positions count on by one.

        Raises:
            ConfigError: The family, or the installed transformers, follows a rule that a processor does not tell.
        """
        name = type(processor).__name__.removesuffix("Processor").lower().replace("_", "")
        if name in _OMNI_FAMILIES:
            return WeightlessPositions(_omni_config(processor, _OMNI_FAMILIES[name]))
        if name in {family.replace("_", "") for family in _UNRULED_FAMILIES}:
            raise ConfigError(
                f"{type(processor).__name__} belongs to a family with multi-axis positions by a rule that is not known "
                f"here; packing with plain positions would train another model. Use PositionRule.from_config with the "
                f"model's config, or ModelPositions with its get_rope_index."
            )
        families = {family.replace("_", ""): family for family in (*_CLIP_FAMILIES, *_FRAME_FAMILIES)}
        if name not in families:
            return None
        family = families[name]
        if family in _CLIP_FAMILIES and not _clip_rule_is_installed():
            raise ConfigError(
                f"The installed transformers places the videos of {family} by another rule than the one here, and a "
                f"processor does not know it; positions would be wrong. Use PositionRule.from_config with the model's "
                f"config, or transformers {'.'.join(map(str, _CLIP_RULE_SINCE))} or later."
            )
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
        if mask is None or mask.numpy().all():
            is_text = not types.numpy().any()
            return torch.arange(len(ids)).expand(3, -1) if is_text else self._walk(types, self._media(sample))
        visible = mask.bool()
        positions = torch.zeros(3, len(ids), dtype=torch.long)
        positions[:, visible] = self._walk(types[visible], self._media(sample))
        return positions

    def _types(self, sample: Sample, ids: torch.Tensor) -> torch.Tensor:
        types = token_row(sample, "mm_token_type_ids")
        return _mark_media(ids, self.image_token_id, self.video_token_id) if types is None else types

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


def _clip_rule_is_installed() -> bool:
    """Say whether the installed transformers places clips by the rule above.

    Before 5.3 text went on after the last frame's time, and until 5.17 seconds were cut to whole numbers.
    """
    from transformers import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return (major, minor) >= _CLIP_RULE_SINCE


def _read(config: Any, name: str, *, default: Any) -> Any:
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


@dataclass(frozen=True, slots=True)
class ModelPositions:
    """A position rule that asks a model; call it with an encoded sample."""

    get_rope_index: Callable[..., Any]

    def __call__(self, sample: Sample) -> torch.Tensor | None:
        """Return the positions `[3, length]`, or None where the callback takes no `input_ids`."""
        return compute_mrope_position_ids(sample, self.get_rope_index)


@dataclass(frozen=True, slots=True)
class WeightlessPositions:
    """A position rule that asks a model's class, with its config and without its weights; call it with a sample.

    It follows the installed transformers exactly, but imports the model's code in every worker.
    """

    config: Any
    """The model's config."""

    @classmethod
    def find(cls, config: Any) -> WeightlessPositions | None:
        """Return the rule, or None where transformers has no class with a `get_rope_index` for that config.

        Args:
            config: A transformers config object, or the contents of its `config.json`.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        if isinstance(config, Mapping):
            if config.get("model_type") not in CONFIG_MAPPING:
                return None
            config = AutoConfig.for_model(**config)
        return cls(config) if hasattr(_model_class(config), "get_rope_index") else None

    def __call__(self, sample: Sample) -> torch.Tensor | None:
        """Return the positions `[3, length]` of an encoded sample."""
        model_class = _model_class(self.config)
        shell = model_class.__new__(model_class)
        torch.nn.Module.__init__(shell)
        shell.config = self.config
        vision = getattr(self.config, "vision_config", None)
        shell.spatial_merge_size = getattr(vision, "spatial_merge_size", None)  # Qwen-Omni looks for it here
        return compute_mrope_position_ids(sample, shell.get_rope_index)


def _omni_config(processor: Any, prefix: str) -> Any:
    """Return a config of Qwen-Omni's thinker with the processor's tokens and its pace of positions."""
    import transformers

    tokenizer = processor.tokenizer
    defaults = getattr(type(processor).valid_processor_kwargs, "_defaults", {}).get("videos_kwargs", {})
    config = getattr(transformers, f"{prefix}ThinkerConfig")(
        image_token_id=tokenizer.convert_tokens_to_ids(processor.image_token),
        video_token_id=tokenizer.convert_tokens_to_ids(processor.video_token),
        audio_token_id=tokenizer.convert_tokens_to_ids(processor.audio_token),
        audio_start_token_id=tokenizer.convert_tokens_to_ids(processor.audio_bos_token),
        position_id_per_seconds=int(defaults.get("position_id_per_seconds", 25)),
        vision_config={"spatial_merge_size": int(processor.image_processor.merge_size)},
    )
    config.vision_start_token_id = tokenizer.convert_tokens_to_ids(processor.vision_bos_token)
    return config


def _model_class(config: Any) -> Any:
    from transformers import MODEL_MAPPING

    return MODEL_MAPPING.get(type(config), None)


def compute_mrope_position_ids(sample: Sample, get_rope_index: Callable[..., Any]) -> torch.Tensor | None:
    """Ask a model's `get_rope_index` for the positions of one sample.

    Only arguments that the signature names are passed (a bare `**kwargs` names none), because transformers 4 and 5 name
    different ones. `mm_token_type_ids` are rebuilt from the model's config where a sample has none.

    Args:
        sample: An encoded, unshifted sample.
        get_rope_index: The method, bound to its model.

    Returns:
        `[3, length]`, or None when the callback has no readable signature or takes no `input_ids`.
    """
    try:
        names = set(inspect.signature(get_rope_index).parameters)
    except (TypeError, ValueError):
        return None
    ids = token_row(sample, "input_ids")
    if "input_ids" not in names or ids is None:
        return None
    offered: dict[str, Any] = {
        name: value for name, value in sample.items() if name not in (*TOKEN_KEYS, POSITIONS_KEY)
    }
    offered["input_ids"] = ids[None]
    # Qwen-Omni has its own names for the same numbers, and wants the lengths of clips.
    seconds = sample.get("second_per_grid_ts", sample.get("video_second_per_grid"))
    offered["second_per_grid_ts"] = offered["second_per_grids"] = None if seconds is None else torch.as_tensor(seconds)
    if sample.get("feature_attention_mask") is not None:
        offered["audio_seqlens"] = sample["feature_attention_mask"].sum(dim=1)
    mask = token_row(sample, "attention_mask")
    offered["attention_mask"] = None if mask is None else mask[None]
    if "mm_token_type_ids" in names:
        types = token_row(sample, "mm_token_type_ids")
        offered["mm_token_type_ids"] = (_types_from_config(ids, get_rope_index) if types is None else types)[None]
    result = get_rope_index(**{name: value for name, value in offered.items() if name in names})
    positions: torch.Tensor = result[0] if isinstance(result, tuple) else result
    positions = positions[:, 0] if positions.ndim == 3 else positions
    is_whole = positions.is_floating_point() and bool((positions == positions.round()).all())
    return positions.long() if is_whole else positions


def stack_positions(
    samples: Sequence[Sample], rule: Callable[[Sample], torch.Tensor | None] | None, length: int
) -> dict[str, torch.Tensor]:
    """Return `position_ids` `[3, B, length]` of rows that are padded (or cut) to a length; nothing without a rule."""
    axes = [None if rule is None else rule(sample) for sample in samples]
    known = [pad(row, (0, length - row.shape[1])) for row in axes if row is not None]
    return {POSITIONS_KEY: torch.stack(known, dim=1)} if known else {}


def _types_from_config(ids: torch.Tensor, get_rope_index: Callable[..., Any]) -> torch.Tensor:
    """Mark media tokens by the ids in the config of the model that is asked."""
    config = getattr(getattr(get_rope_index, "__self__", None), "config", None)
    return _mark_media(ids, getattr(config, "image_token_id", None), getattr(config, "video_token_id", None))


def _mark_media(ids: torch.Tensor, image_id: int | None, video_id: int | None) -> torch.Tensor:
    """Return `mm_token_type_ids` for ids: 1 for image tokens, 2 for video tokens, 0 for text."""
    types = torch.zeros_like(ids)
    for kind, token_id in ((_IMAGE, image_id), (_VIDEO, video_id)):
        if token_id is not None:
            types[ids == token_id] = kind
    return types
