"""The names and constants of samples and batches that several rooms must agree on.

Values only: no torch, no imports from other rooms. A key that only one room reads is named in that room.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

Sample: TypeAlias = Mapping[str, Any]
"""An encoded sample: tensors along its tokens, and its media."""

IGNORE: Final = -100
"""The label of a token that is not trained on."""

FAKE_IMAGE_SIZE: Final = (56, 56)
"""Height and width of the white image that text-only samples get where every rank must run the vision tower."""

EXIF_ROTATE: Final = "exif_rotate"
"""True in media items whose images are turned as their EXIF orientation says; indexes hold the turned sizes."""

INJECTED_FAKE_KEY: Final = "_injected_fake"
"""True in examples whose only image is the fake one."""

TOKEN_KEYS: Final = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
"""Tensors with one entry per token."""

POSITIONS_KEY: Final = "position_ids"
"""Positions also run along the tokens, on their last axis: `[S]`, or `[3, S]` for families with several axes."""

PIXEL_KEYS: Final = ("pixel_values", "pixel_values_videos")
"""Pixels of images and of videos."""

PIXEL_SPEC_KEY: Final = "_pixels"
"""How to finish compact pixels (bytes); absent where pixels are finished."""

IMAGE_COUNTS_KEY: Final = "n_images_per_sample"
VIDEO_COUNTS_KEY: Final = "n_videos_per_sample"

IMAGE_GRID_KEYS: Final = ("image_grid_hws", "image_grid_thw", "image_sizes", "image_position_ids", "grid_thws")
"""What describes each image, a row per image; a family uses one of these names."""

IMAGE_ROW_KEYS: Final = ("image_attention_mask", "pixel_attention_mask", "image_flags", "num_local_patches")
"""Further rows per image of some families."""

PATCH_KEYS: Final = ("patch_pixel_values", "num_patches", "patch_newline_mask")
"""Crop patches of images without a grid (Step3)."""

VIDEO_GRID_KEYS: Final = ("video_grid_thw", "video_grid_hws")

VIDEO_ROW_KEYS: Final = ("second_per_grid_ts", "video_second_per_grid", "num_frames_per_video")
"""Further rows per video."""

VIDEO_FRAME_KEYS: Final = ("video_position_ids",)
"""A row per row of `pixel_values_videos`."""

MEDIA_KEYS: Final = (
    PIXEL_KEYS[0],
    *IMAGE_GRID_KEYS,
    *IMAGE_ROW_KEYS,
    *PATCH_KEYS,
    IMAGE_COUNTS_KEY,
    PIXEL_KEYS[1],
    *VIDEO_GRID_KEYS,
    *VIDEO_ROW_KEYS,
    *VIDEO_FRAME_KEYS,
    VIDEO_COUNTS_KEY,
)
"""All keys under which a batch carries images and videos."""

IMAGE_FORMATS: Final = (
    *("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM"),
    *("HEIF", "JXL"),  # where the user has registered a plugin for them
)
"""Of the formats that Pillow knows, those that are read: others are an interpreter (EPS) or have no magic bytes."""
