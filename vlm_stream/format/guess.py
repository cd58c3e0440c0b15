"""Which layout the samples of tars made elsewhere have, from the first of them.

Enters: names of members and contents of text members. Leaves: a `FieldMap`. What a JSON member holds is recognised as
the record of a data file would be, with the members beside it as its media.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import MEDIA_TYPES
from vlm_stream.errors import BadSampleError, ConfigError, DatasetError, SourceError
from vlm_stream.format.fields import LAYOUTS, FieldMap, medium_of, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.sources import ShareGptForm

_TURNS: Final = ("messages", "conversations", "conversation", "texts")
"""Columns that hold turns: whoever has one means it to be read."""

_SAID: Final = tuple(name for name in LAYOUTS if name != "energon")
"""Layouts that somebody can name: that of Energon comes with its datasets."""


def guess_fields(samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]]) -> FieldMap:
    """Return the layout that the first samples of tars show.

    Args:
        samples: Names of the members of each, without the key, and contents of its text members by name.

    Raises:
        ConfigError: They show none; the sentence says what there is and how to name the layout.
        DatasetError: They show two.
    """
    records = _records(samples)
    if _is_native(samples, records):
        return FieldMap()
    refused = ""
    try:
        form = _recognise(samples, records, FieldMap(layout="sharegpt"))
    except SourceError as error:
        form, refused = None, str(error)
    has_turns = any(isinstance(record.get(name), list) for record in records for name in _TURNS)
    if refused and has_turns:
        raise ConfigError(f"{refused} For tars, they go behind --layout sharegpt.")
    if form is not None and form.text is None:
        _refuse_two_layouts(samples, records)
        return _to_fields(form)
    for (names, texts), record in zip(samples, records, strict=True):
        if any(map(medium_of, names)) and (found := _captions(texts, record)):
            return found
    if form is not None:
        return _to_fields(form)
    keys = f" with the fields {', '.join(sorted(records[0]))}" if records[0] else ""
    raise ConfigError(
        f"the first sample has the members {', '.join(samples[0][0]) or 'none'}{keys}: no known layout, so it cannot "
        f"become a conversation. Name one with --layout ({', '.join(_SAID)}) and --columns, --tags or --caption."
    )


def _refuse_two_layouts(
    samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]], records: Sequence[dict[str, Any]]
) -> None:
    """Refuse captions and conversations in one tar, where more than a tenth would be left out as no conversations."""
    captions = [
        names
        for (names, texts), record in zip(samples, records, strict=True)
        if not record and any(map(medium_of, names)) and _captions(texts, record)
    ]
    if 10 * len(captions) > len(samples):
        raise DatasetError(
            f"of the first {len(samples)} samples {len(captions)} are media with a text, and others are conversations "
            f"in JSON: an index has one layout, and leaves out what it does not fit. Put them into tars of their own, "
            f"or say which are wanted with --layout caption or --layout sharegpt."
        )


def complete_fields(fields: FieldMap, samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]]) -> FieldMap:
    """Return a field map of layout sharegpt with what the first samples show and it does not say."""
    try:
        form = _recognise(samples, _records(samples), fields)
    except SourceError:
        return fields
    return fields if form is None else replace(_to_fields(form), prompt=fields.prompt, caption=fields.caption)


def _records(samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]]) -> list[dict[str, Any]]:
    """Return the JSON object of each sample; an empty one where it has none."""
    found = []
    for _, texts in samples:
        text = next((text for name, text in texts.items() if name.lower() == "json"), b"{}")
        try:
            value = parse_json(text)
        except BadSampleError:
            value = {}
        found.append(value if isinstance(value, dict) else {})
    return found


def _is_native(samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]], records: Sequence[dict[str, Any]]) -> bool:
    """Tell whether conversations are of our own form: with roles, and media items in samples that have media."""
    found = [
        (names, turns)
        for (names, _), record in zip(samples, records, strict=True)
        if isinstance(turns := record.get("conversation"), list)
    ]
    if not any("role" in turn for _, turns in found for turn in turns if isinstance(turn, dict)):
        return False
    with_media = [turns for names, turns in found if any(map(medium_of, names))]
    return not with_media or any(map(_shows_media, with_media))


def _shows_media(turns: list[Any]) -> bool:
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    items = [item for content in contents if isinstance(content, list) for item in content if isinstance(item, dict)]
    return any(item.get("type") in MEDIA_TYPES and item.get(item["type"]) is not None for item in items)


def _recognise(
    samples: Sequence[tuple[Sequence[str], Mapping[str, bytes]]], records: Sequence[dict[str, Any]], fields: FieldMap
) -> ShareGptForm | None:
    """Return the form of the JSON, whose media are the members beside it where it names none."""
    from vlm_stream.sources import held_media, recognise

    columns, rows = {}, [dict(record) for record in records]
    for medium in MEDIA_TYPES:
        held = [held_media(row, f"{medium}s") for row in rows]
        usual = Counter(name for name in held if name)
        column = fields.columns.get(f"{medium}s") or (usual.most_common(1)[0][0] if usual else f"{medium}s")
        columns[f"{medium}s"] = column
        for (names, _), row, name in zip(samples, rows, held, strict=True):
            members = [member for member in names if medium_of(member) == medium]
            if row and name is None and members:
                row[column] = members
    first = True if fields.media_first else None
    found = recognise([row for row in rows if row], {**columns, **fields.columns}, fields.tags, media_first=first)
    return found.form if found else None


def _to_fields(form: ShareGptForm) -> FieldMap:
    columns, tags = form.to_dicts()
    return FieldMap(layout="sharegpt", columns=columns, tags=tags, media_first=form.media_first)


def _captions(texts: Mapping[str, bytes], record: Mapping[str, Any]) -> FieldMap | None:
    """Return how a sample says what its media show."""
    present = {name.lower() for name in texts}
    text = next((name for name in ("txt", "text", "caption") if name in present), "")
    if text:
        return FieldMap(layout="caption", caption=text)
    column = next((name for name in ("caption", "text") if isinstance(record.get(name), str)), "")
    if column:
        return FieldMap(layout="caption", caption=f"json:{column}")
    if "cls" in present:
        return FieldMap(layout="caption", caption="cls", prompt="Which class does this image belong to?")
    return None
