"""The file beside an index with the tokens of texts that the tar does not keep: of tars made elsewhere, or recounted.

Enters: samples' conversations and the tokens that counting made of them. Leaves: the place of each in the file, and its
bytes. Whoever trains with the same tokenizer, template and release reads them by range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import crc32c
import numpy as np

from vlm_stream.encode import text_to_bytes, unpack_text
from vlm_stream.errors import NotFoundError
from vlm_stream.format import FieldMap, are_tokens_short, texts_name
from vlm_stream.storage import ObjectReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlm_stream.conversation import Conversation
    from vlm_stream.format import ShardIndex
    from vlm_stream.storage import Store

NO_TEXT: Final = (0, 0, 0)
"""Offset, size and crc32c of a sample whose tokens are not in the file."""


@dataclass(slots=True)
class TextFile:
    """The tokens of a shard's texts, one after the other."""

    fields: FieldMap
    key: str = ""
    """Of the kept text; empty before there is any."""
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def add(
        self, conversation: Conversation, tokens: Mapping[str, Any] | None, own: Any, texts: Mapping[str, bytes]
    ) -> tuple[int, int, int]:
        """Append the tokens of one sample; return offset, size and crc32c.

        Where the JSON of our own shards keeps them or would not, because they take more bytes than the text, they are
        left out: a shard and its index are the same after a conversion and a recount.

        Args:
            conversation: The sample's, as training will read it.
            tokens: What counting has made of it; None: nothing that training can use.
            own: What its JSON keeps.
            texts: Its text members.
        """
        kept = None if tokens is None else unpack_text(tokens, tokens["key"])
        if tokens is None or kept is None or unpack_text(own, tokens["key"]) is not None:
            return NO_TEXT
        if self.fields.layout == "native" and not are_tokens_short(texts.get("json", b""), tokens):
            return NO_TEXT
        self.key = tokens["key"]
        data = text_to_bytes(kept, conversation)
        self.parts.append(data)
        self.num_bytes += len(data)
        return self.num_bytes - len(data), len(data), crc32c.crc32c(data)

    def write(self, store: Store, shard: str) -> str:
        """Write the file beside a shard's index, if it has anything; return its name, or nothing."""
        if not self.parts:
            return ""
        name = texts_name(shard, self.key)
        store.put(name, b"".join(self.parts))
        return name


def check_texts(store: Store, index: ShardIndex, name: str) -> Iterator[tuple[int, str]]:
    """Yield the rows whose tokens in a file are not those that the index describes, and what is wrong with them."""
    if index.texts is None:
        return
    rows = np.flatnonzero(index.texts.size)
    rows = rows[np.argsort(index.texts.offset[rows], kind="stable")]
    try:
        size = store.head(name).size
    except NotFoundError:
        yield int(rows[0]), f"there is no {name}, so the texts of this shard are tokenised in training."
        return
    with ObjectReader(store, name, size) as reader:
        for row in rows.tolist():
            offset, length, crc = index.text(row) or NO_TEXT
            if offset < reader.position or offset + length > size:
                yield row, f"its tokens are not at byte {offset} of {name}, so its text is tokenised in training."
                continue
            reader.skip_to(offset)
            if crc32c.crc32c(reader.read(length)) != crc:
                yield row, f"its tokens in {name} are damaged, so its text is tokenised in training."
