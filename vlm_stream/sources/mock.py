"""Made-up samples of noise images and random words, for smoke tests and throughput runs without data."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vlm_stream.errors import ConfigError

_NUM_WORDS: Final = 256
_WORDS: Final = (
    "a above across against amber and arch at bench beside between bird blue boat bridge bright brown by calm city "
    "clear cloud coast crowd dark distant door evening face field figure flower from garden glass green grey group "
    "hand harbour hill house in indoor is lamp large leaf light line long market morning mountain near of old on open "
    "orange over path person red river road roof round shadow small stone street table the tree under wall water"
)
"""78 words."""


def build_mock_vlm_dataset(
    num_samples: int = 10,
    num_images_per_sample: int = 1,
    image_size: tuple[int, int] = (256, 256),
    prompt: str = "Describe this image.",
    responses: Sequence[str] | None = None,
    max_length: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Return samples with noise images; the same arguments give the same samples.

    Args:
        num_samples: How many.
        num_images_per_sample: Images before the prompt of each.
        image_size: Width and height.
        prompt: The user's text.
        responses: The assistant's texts, taken in turn; random words if None.
        max_length: Number of random words; 256 if None.
        seed: Of pixels and words.
        **kwargs: Options of other factories; refused, because nothing would read them.
    """
    from PIL import Image

    if kwargs:
        raise ConfigError(f"build_mock_vlm_dataset has no option {', '.join(sorted(kwargs))}; leave it out.")
    if responses is not None and not len(responses):
        raise ConfigError("responses is an empty list, so there is nothing to answer; give texts, or None for words.")
    width, height = image_size
    rng = np.random.default_rng(seed)
    words = _WORDS.split()
    samples = []
    for number in range(num_samples):
        pixels = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(num_images_per_sample)]
        if responses is None:
            answer = " ".join(rng.choice(words, size=_NUM_WORDS if max_length is None else max_length))
        else:
            answer = responses[number % len(responses)]
        content = [{"type": "image", "image": Image.fromarray(image)} for image in pixels]
        samples.append(
            {
                "conversation": [
                    {"role": "user", "content": [*content, {"type": "text", "text": prompt}]},
                    {"role": "assistant", "content": [{"type": "text", "text": answer}]},
                ]
            }
        )
    return samples
