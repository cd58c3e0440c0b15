"""Sample types of Megatron-Energon: members and a field map become a conversation.

Enters: the name of a sample type, its field map (`caption: json[text]`, `image: jpg,png`), and one sample's members.
Leaves: a conversation whose media items name members. No code of a dataset is run, and no file is read here.

| type | user | assistant |
|---|---|---|
| Captioning, ImageClassification | medium, prompt | caption; name (or number) of the class |
| OCR | image, prompt | text |
| VQA, VQAOCR, VidQA | medium, context | the answer of the greatest weight, else the first |
| MultiChoiceVQA | image, context, lettered choices | the right choice, with its letter |
| Text | | text |
| Interleaved, SimilarityInterleaved | | texts and media in their order |
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import MEDIA_TYPES, SPAN_KEYS
from vlm_stream.errors import BadSampleError
from vlm_stream.format.fields import medium_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation, Item

SAMPLE_FIELDS: Final = {
    "CaptioningSample": ("image", "caption"),
    "ImageClassificationSample": ("image",),
    "InterleavedSample": ("sequence",),
    "MultiChoiceVQASample": ("image", "context", "choices", "correct_choice_idx"),
    "OCRSample": ("image", "text"),
    "SimilarityInterleavedSample": ("images", "texts"),
    "TextSample": ("text",),
    "VQAOCRSample": ("image", "context", "answers"),
    "VQASample": ("image", "context", "answers"),
    "VidQASample": ("video", "context", "answers"),
}
"""The fields that a conversation is made of, for each sample type that is read."""
DEFAULT_PROMPTS: Final = {
    "ImageClassificationSample": "What does this image show?",
    "OCRSample": "Read the text in this image.",
}
_ACCESS: Final = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def read_energon_sample(
    sample_type: str, field_map: Mapping[str, str], prompt: str, names: Sequence[str], texts: Mapping[str, bytes]
) -> Conversation:
    """Return the conversation of one sample.

    Args:
        sample_type: A key of `SAMPLE_FIELDS`.
        field_map: Where each field of the type comes from.
        prompt: What the user asks, where the type has no question.
        names: Names of all members of the sample, without the key.
        texts: Contents of its text members, by name in lower case.

    Raises:
        BadSampleError: The sample lacks a field, or it holds something else than its type says.
    """
    sample = _Fields(field_map, {name.lower(): name for name in names}, texts)
    if sample_type == "TextSample":
        return [_turn("assistant", [_text(sample.string("text"))])]
    if sample_type == "InterleavedSample":
        return [_turn("assistant", [sample.item(entry) for entry in sample.list("sequence")])]
    if sample_type == "SimilarityInterleavedSample":
        return [_turn("assistant", _interleave(sample))]
    medium: Item = sample.medium("video" if sample_type == "VidQASample" else "image")
    if sample_type == "MultiChoiceVQASample":
        question, answer = _multiple_choice(sample)
    elif "context" in SAMPLE_FIELDS[sample_type]:
        question, answer = sample.string("context"), _best_answer(sample)
    elif sample_type == "ImageClassificationSample":
        question, answer = prompt, str(sample.get("label_name") or sample["label"])
    else:
        question, answer = prompt, sample.string(SAMPLE_FIELDS[sample_type][1])
    return [_turn("user", [medium, _text(question)]), _turn("assistant", [_text(answer.strip())])]


class _Fields:
    """The fields of one sample, looked up by the field map."""

    def __init__(self, field_map: Mapping[str, str], members: Mapping[str, str], texts: Mapping[str, bytes]) -> None:
        self._map, self._members, self._texts = field_map, members, texts

    def __getitem__(self, name: str) -> Any:
        """Return a field: what the first of its alternatives finds that is there."""
        if name not in self._map:
            raise _bad("no_field", f"its field map has no '{name}'.")
        for option in self._map[name].split(","):
            match = _ACCESS.fullmatch(option.strip())
            member, path = (match[1].lower(), match[2][1:-1].split("][") if match[2] else []) if match else (option, [])
            if member not in self._members:
                continue
            if not path and medium_of(member):
                return self._members[member]
            try:
                return _walk(self._content(member), path)
            except (KeyError, IndexError, ValueError, TypeError):
                continue
        raise _bad("no_field", f"'{name}' ({self._map[name]}) is not among its members {', '.join(self._members)}.")

    def get(self, name: str) -> Any:
        """Return a field that a sample may have; None without it."""
        try:
            return self[name] if name in self._map else None
        except BadSampleError:
            return None

    def string(self, name: str) -> str:
        """Return a field that is text."""
        value = self[name]
        if not isinstance(value, str):
            raise _bad("content_not_text", f"'{name}' is a {type(value).__name__}, not text.")
        return value

    def list(self, name: str) -> list[Any]:
        """Return a field that is a list."""
        value = self[name]
        if not isinstance(value, list):
            raise _bad("not_a_list", f"'{name}' is a {type(value).__name__}, not a list.")
        return value

    def medium(self, name: str) -> Item:
        """Return the item of a field that is a medium: a member, or the name of one."""
        where = self.string(name)
        kind = medium_of(where) or name
        return {"type": kind, kind: where}

    def item(self, entry: Any) -> Item:
        """Return an entry of a sequence: the medium whose member it names, or text."""
        if isinstance(entry, dict):
            medium = next((medium for medium in MEDIA_TYPES if isinstance(entry.get(medium), str)), None)
            if medium:
                return {"type": medium, medium: entry[medium]} | {key: entry[key] for key in SPAN_KEYS if key in entry}
            entry = entry.get("text")
        if not isinstance(entry, str):
            raise _bad("content_not_text", f"its sequence holds a {type(entry).__name__}: neither text nor a medium.")
        medium = medium_of(entry)
        is_member = entry.lower() in self._members or posixpath.basename(entry).lower() in self._members
        return {"type": medium, medium: entry} if medium and is_member else _text(entry)

    def _content(self, member: str) -> Any:
        content = self._texts[member]
        return json.loads(content) if member.rpartition(".")[2] == "json" else content.decode("utf-8", "replace")


def _walk(value: Any, path: Sequence[str]) -> Any:
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _best_answer(sample: _Fields) -> str:
    answers = sample["answers"]
    if isinstance(answers, str):
        return answers
    if not isinstance(answers, list) or not answers:
        raise _bad("no_answer", "it has no answer, so there is nothing to learn.")
    weights = sample.get("answer_weights")
    best = 0
    if isinstance(weights, list) and len(weights) == len(answers):
        best = max(range(len(answers)), key=lambda number: weights[number])
    return str(answers[best])


def _multiple_choice(sample: _Fields) -> tuple[str, str]:
    choices = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, sample.list("choices"), strict=False)]
    right = int(sample["correct_choice_idx"])
    if not 0 <= right < len(choices):
        raise _bad("no_answer", f"choice {right} of {len(choices)} is said to be right, so there is nothing to learn.")
    return "\n".join([sample.string("context"), *choices]), choices[right]


def _interleave(sample: _Fields) -> list[Item]:
    """Return texts, each behind the images that are matched to it; images without a match come first."""
    texts = sample.list("texts")
    images = sample["images"]
    matched = sample.get("matched_text_indices")
    similarity = sample.get("similarity_matrix")
    if matched is None and similarity is not None:
        matched = [max(range(len(row)), key=row.__getitem__) for row in similarity]
    places = list(matched or [0] * len(images))
    if len(places) != len(images) or not all(type(place) is int and 0 <= place < len(texts) for place in places):
        raise _bad("bad_match", f"its {len(images)} images are not matched to its {len(texts)} texts.")
    items: list[Item] = []
    for number, text in enumerate(texts):
        items += [
            sample.item({"image": _name_of(image)}) for image, at in zip(images, places, strict=True) if at == number
        ]
        items.append(sample.item({"text": text}))
    return items


def _name_of(image: Any) -> Any:
    return (
        next((image[key] for key in ("image", "image_name", "name") if key in image), None)
        if isinstance(image, dict)
        else image
    )


def _turn(role: str, content: list[Item]) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(text: str) -> Item:
    return {"type": "text", "text": text}


def _bad(reason: str, detail: str) -> BadSampleError:
    return BadSampleError("convert", reason, detail)
