"""`PreTokenizedDatasetWrapper`: encoded samples, made in the worker that is asked for them.

Enters: a dataset of conversations and a processor. Leaves: what `encode` makes of each, another in place of each that
is bad or too long. The dataset's own dicts are never written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from vlm_stream.collate import make_robust_collate
from vlm_stream.encode import EncodeConfig, Encoder, fit_length
from vlm_stream.mapstyle.replace import Replacer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PreTokenizedDatasetWrapper"]


class PreTokenizedDatasetWrapper(Dataset[Any]):
    """Encoded samples: `input_ids`, `attention_mask`, `labels` of one length, and media tensors; nothing is shifted.

    Attributes:
        ledger: What was replaced in this process.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Any,
        max_length: int | None = None,
        max_retries: int = 10,
        truncate: bool = False,
        post_tokenize_hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None,
        inject_fake_images: bool = True,
        *,
        seed: int = 0,
        ledger_path: str | None = None,
    ) -> None:
        """Wrap a dataset.

        Args:
            dataset: Samples with a `conversation` whose media are files, bytes or decoded objects.
            processor: A transformers processor.
            max_length: Longest sample in tokens; longer ones are replaced, or cut.
            max_retries: How many samples are tried for one.
            truncate: Cut samples that are too long, unless the cut would take media away.
            post_tokenize_hook: Called as `hook(sample, processor)` with one labelled sample, before its length is
                checked.
            inject_fake_images: Give text-only samples an image that attention does not see.
            seed: Chooses which samples stand in for others.
            ledger_path: File to which all workers append what failed.
        """
        self.dataset = dataset
        self.processor = processor
        self.max_length = max_length
        self.max_retries = max_retries
        self.truncate = truncate
        self.post_tokenize_hook = post_tokenize_hook
        self._encoder = Encoder(processor, EncodeConfig(inject_fake_image=inject_fake_images))
        self._replacer = Replacer(
            source="PreTokenizedDatasetWrapper", max_retries=max_retries, seed=seed, ledger_path=ledger_path
        )
        self.ledger = self._replacer.ledger

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return the encoded sample, or one that stands in for it."""
        sample: dict[str, Any] = self._replacer.fetch(self.encode, idx, len(self.dataset))
        return sample

    def encode(self, index: int) -> dict[str, Any]:
        """Return this very sample, encoded.

        Raises:
            BadSampleError: It cannot be used.
        """
        sample = self._encoder.encode(self.dataset[index]["conversation"], {})
        if self.post_tokenize_hook is not None:
            sample = self.post_tokenize_hook(sample, self.processor)
        if self.max_length is not None:
            sample = fit_length(self.processor, sample, self.max_length, "truncate" if self.truncate else "bad")
        return sample

    def robust_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that a batch that fails is drawn again."""
        return make_robust_collate(self, collate_fn, self.max_retries)
