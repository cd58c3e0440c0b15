"""A sequence that is longer than allowed: a bad sample, or cut where no medium is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.encode.labels import SEQUENCE_KEYS
from vlm_stream.encode.media_tokens import media_token_ids
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    import torch

__all__ = ["fit_length"]


def fit_length(processor: Any, sample: dict[str, Any], max_length: int, overlong: str) -> dict[str, Any]:
    """Return the sample when it fits, or its beginning when it may be cut.

    Raises:
        BadSampleError: When it is too long and may not be cut, or when the cut would take media tokens away.
    """
    ids: torch.Tensor = sample["input_ids"]
    length = len(ids)
    if length <= max_length:
        return sample
    if overlong == "bad":
        raise BadSampleError("encode", "overlong", f"The sequence has {length} tokens, more than {max_length}.")
    import torch

    media = torch.tensor(sorted(media_token_ids(processor)), dtype=ids.dtype)
    if bool(torch.isin(ids[max_length:], media).any()):
        raise BadSampleError(
            "encode",
            "truncated_media",
            f"Cutting {length} tokens at {max_length} would take media tokens away; their pixels would match nothing.",
        )
    return {key: value[:max_length] if key in SEQUENCE_KEYS else value for key, value in sample.items()}
