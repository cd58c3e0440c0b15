"""Text tokens of a sample: exact with a processor, estimated without; and whether the processor takes its media.

Enters: the name of a processor, or None; then conversations with the sizes of their media. Leaves: counts, and the note
for the manifest of how they came about. A processor is loaded once per process. How counting works is the business of
`tokens`.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from vlm_stream.conversation import iter_media
from vlm_stream.errors import ConfigError, blame_sample
from vlm_stream.shards.manifest import TokenCounting
from vlm_stream.tokens import Geometry, TextCounter, check_media_sizes, guess_text_tokens

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation
    from vlm_stream.tokens import MediaSizes

__all__ = ["EstimatingCounter", "ExactCounter", "SampleCounter", "load_processor", "open_counter", "template_digest"]

_PROBE: Final = (
    "The quick brown foxes' 1,024 jumps — 3.14e-9 m/s; naïve façade, Straße, \u4f60\u597d\u4e16\u754c, "
    "\u043f\u0440\u0438\u0432\u0435\u0442, \u0645\u0631\u062d\u0628\u0627, \U0001f600\n\n"
    "    def f(x):\n\treturn {'k': x[0] != None}  # <b>&amp;</b> \\frac{a}{b}\n"
)
"""Text on which tokenizers with the same vocabulary and other rules differ."""


class SampleCounter(Protocol):
    """Counts the text tokens of samples."""

    @property
    def note(self) -> TokenCounting:
        """Return how the counts come about."""
        ...

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> int:
        """Return the tokens of one sample without its media, one for every media placeholder.

        Args:
            conversation: The sample.
            sizes: Of its media.
            known: What the record itself says of its text tokens, if anything.

        Raises:
            BadSampleError: The processor would refuse the sample.
        """
        ...


class EstimatingCounter:
    """A third of the characters; a count that the record brings along goes before that."""

    def __init__(self) -> None:
        """Know only the limits that are common to all processors."""
        self._geometry = Geometry.unknown()

    @property
    def note(self) -> TokenCounting:
        """Return that counts are estimates."""
        return TokenCounting(kind="estimated")

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> int:
        """Return `known` and one for every medium if it is a count, else the guess."""
        check_media_sizes(sizes, self._geometry)
        if isinstance(known, int) and not isinstance(known, bool) and known >= 0:
            return known + sum(1 for _ in iter_media(conversation))
        return guess_text_tokens(conversation)


class ExactCounter:
    """The rendered chat template of one processor, tokenised."""

    def __init__(self, name: str, processor: Any) -> None:
        """Learn how the processor writes and what media it takes."""
        self._counter = TextCounter(processor)
        self._name = name

    @property
    def note(self) -> TokenCounting:
        """Return which processor counts."""
        import transformers

        processor = self._counter.processor
        return TokenCounting(
            kind="exact" if self._counter.geometry.is_exact else "estimated",
            processor=self._name,
            processor_class=type(processor).__name__,
            template_sha256=template_digest(processor),
            library=f"transformers {transformers.__version__}",
            geometry=self._counter.geometry.to_json(),
        )

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> int:  # noqa: ARG002
        """Return the exact count."""
        check_media_sizes(sizes, self._counter.geometry)
        try:
            return self._counter.count(conversation, sizes)
        except Exception as error:  # templates and tokenizers raise anything on content they do not accept
            fact = f"{type(self._counter.processor).__name__} cannot write the sample down"
            raise blame_sample(error, "convert", "processor_error", fact) from error


@cache
def open_counter(processor: str | None, *, trust_remote_code: bool = False) -> SampleCounter:
    """Return the counter for a processor's name or path, loaded once per process.

    Raises:
        ConfigError: There is no such processor.
    """
    if processor is None:
        return EstimatingCounter()
    return ExactCounter(processor, load_processor(processor, trust_remote_code=trust_remote_code))


def load_processor(name: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load a transformers processor, with any options of its `from_pretrained`.

    Raises:
        ConfigError: There is no such processor.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            name, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:  # the hub's client, config parsers and remote code raise nearly anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the processor '{name}' cannot be loaded ({first}), so nothing can be counted or encoded. "
            f"Give a name on the hub, or a folder that save_pretrained has written."
        ) from error


def template_digest(processor: Any) -> str:
    """Return what identifies how text becomes ids: the chat template, the vocabulary, and how a probe is cut by it.

    Not the tokenizer's file: releases of the tokenizers library write the same tokenizer differently.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=itemgetter(1, 0))
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([template, vocabulary, list(probe)]).encode()).hexdigest()
