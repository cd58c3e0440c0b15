"""`RobustDatasetWrapper`: conversations, with another one in place of each that cannot be loaded.

Enters: a dataset of samples. Leaves: its items; with `preload_media`, copies whose media are decoded. The dataset's own
dicts are never written to, so memory does not grow with what was visited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from vlm_stream.collate import make_robust_collate
from vlm_stream.conversation import MEDIA_TYPES
from vlm_stream.encode import (
    EncodeConfig,
    has_media,
    inject_fake_image,
    load_media,
    make_fake_image,
    processor_reads,
)
from vlm_stream.errors import ConfigError
from vlm_stream.mapstyle.replace import Replacer

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.conversation import Conversation
    from vlm_stream.encode import LoadedMedia

__all__ = ["RobustDatasetWrapper"]


class RobustDatasetWrapper(Dataset[Any]):
    """Items of a dataset, whatever is wrong with some of them.

    Attributes:
        preload_media: Decode media here, in the worker, and give text-only conversations a fake image.
        processor: Whose frame rule decides which frames of a video are read; needed to preload.
        ledger: What was replaced in this process.
    """

    def __init__(self, dataset: Any, max_retries: int = 10, *, seed: int = 0, ledger_path: str | None = None) -> None:
        """Wrap a dataset.

        Args:
            dataset: Anything with `len` and item access.
            max_retries: How many items are tried for one.
            seed: Chooses which items stand in for others.
            ledger_path: File to which all workers append what failed.
        """
        self.dataset = dataset
        self.max_retries = max_retries
        self.preload_media = False
        self.processor: Any = None
        self._replacer = Replacer(
            source="RobustDatasetWrapper", max_retries=max_retries, seed=seed, ledger_path=ledger_path
        )
        self.ledger = self._replacer.ledger

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        """Return the item, or one that stands in for it."""
        if self.preload_media and self.processor is None:
            raise ConfigError(
                "preload_media needs to know which frames of a video to read, and the wrapper has no processor. Set "
                "its processor attribute."
            )
        return self._replacer.fetch(self._load, idx, len(self.dataset))

    def _load(self, index: int) -> Any:
        example = self.dataset[index]
        if not self.preload_media or not example.get("conversation"):
            return example
        conversation = example["conversation"]
        if not has_media(conversation):
            return {
                **example,
                "conversation": inject_fake_image(conversation, make_fake_image()),
                "_injected_fake": True,
            }
        config = EncodeConfig()
        loaded = load_media(conversation, {}, config, processor_reads(self.processor, config))
        return {**example, "conversation": _with_loaded(conversation, loaded)}

    def robust_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that a batch that fails is drawn again."""
        return make_robust_collate(self, collate_fn, self.max_retries)


def _with_loaded(conversation: Conversation, loaded: LoadedMedia) -> Conversation:
    """Return a copy whose media items hold decoded media; `loaded` has them in the order of the items."""
    images, videos, audios = iter(loaded.images), iter(loaded.videos), iter(loaded.audios)

    def fill(item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in MEDIA_TYPES:
            return item
        if kind == "video":
            video = next(videos)
            facts = {
                "_video_fps": video.info.fps,
                "_frame_indices": list(video.indices),
                "_total_frames": video.info.frames,
            }
            return {**item, "video": video.frames, **facts}
        return {**item, kind: next(images if kind == "image" else audios)}

    return [
        {**message, "content": [fill(item) for item in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in conversation
    ]
