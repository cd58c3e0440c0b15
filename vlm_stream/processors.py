"""Processors: loaded by name, and told apart by how they turn text into ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from vlm_stream.errors import ConfigError

__all__ = ["load_processor", "open_processor", "template_digest"]

_PROBE: Final = (
    "The quick brown foxes' 1,024 jumps — 3.14e-9 m/s; naïve façade, Straße, \u4f60\u597d\u4e16\u754c, "
    "\u043f\u0440\u0438\u0432\u0435\u0442, \u0645\u0631\u062d\u0628\u0627, \U0001f600\n\n"
    "    def f(x):\n\treturn {'k': x[0] != None}  # <b>&amp;</b> \\frac{a}{b}\n"
)
"""Text on which tokenizers with the same vocabulary and other rules differ."""


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


def open_processor(given: Any) -> Any:
    """Return the processor of a run: an object, or one that is named by name, path, or a mapping with `name`.

    The other entries of a mapping are options of `from_pretrained`.
    """
    if isinstance(given, str | os.PathLike):
        return load_processor(os.fspath(given))
    if not isinstance(given, Mapping):
        return given
    if "name" not in given:
        raise ConfigError("processor is a mapping without 'name', so there is nothing to load; add name: NAME_OR_PATH")
    return load_processor(given["name"], **{key: value for key, value in given.items() if key != "name"})


def template_digest(processor: Any) -> str:
    """Return what identifies how text becomes ids: the chat template, the vocabulary, and how a probe is cut by it.

    Not the tokenizer's file: releases of the tokenizers library write the same tokenizer differently.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=itemgetter(1, 0))
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([template, vocabulary, list(probe)]).encode()).hexdigest()
