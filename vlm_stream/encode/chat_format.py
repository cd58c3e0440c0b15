"""What a processor's chat template writes around turns, learned once by rendering probes.

Enters: a processor. Leaves: `ChatFormat`: the text that opens an assistant's answer, the tokens that end it, the chat
tokens that divide a rendered text into pieces, and the strings that a user must not be able to type as tokens. Nothing
here sees a real conversation.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

from vlm_stream.conversation import Conversation
from vlm_stream.encode.control_tokens import (
    added_tokens,
    media_token_ids,
    media_token_strings,
    placeholder_ids,
)
from vlm_stream.tokens import Processor, render_template, template_of, tokenizer_of

STOP_TOKENS: Final = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<turn|>")
"""Tokens that end a turn wherever a vocabulary has them; the tokenizer's own end token comes on top."""

_USER: Final = ("Xusersentinelonex", "Xusersentineltwox")
_ANSWER: Final = ("Xanswersentinelonex", "Xanswersentineltwox")
# Tokens that an answer may hold by right, although a template may write them too.
_CONTENT_TOKENS: Final = re.compile(r"think|channel|tool|reason|box|quad|ref|point", re.IGNORECASE)

ContentForm = Literal["both", "list", "string"]
_Learned = TypeVar("_Learned")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatFormat:
    """The scaffold of one chat template."""

    header: str
    """What opens an answer, such as `<|im_start|>assistant` and a newline; empty when it could not be learned."""
    header_pattern: re.Pattern[str] | None
    """Finds the headers in a rendered text, without their last blanks."""
    closing: str
    """What the template writes after the last answer."""
    end_pattern: re.Pattern[str] | None
    """Finds what follows an answer, for templates that write no token at its end."""
    chat_ids: dict[str, int]
    """Tokens that the template writes around turns; in a rendered text they divide one piece from the next."""
    stop_ids: frozenset[int]
    """Those that end an answer."""
    control: re.Pattern[str] | None
    """Finds what must not become tokens when it is typed: chat tokens, media tokens, a header without tokens."""
    chat_pattern: re.Pattern[str] | None
    """Finds the chat tokens in a rendered text; one group, so that `split` keeps them."""
    content_form: ContentForm
    """Which forms of `content` the template shows: text in a list of items, a plain string, or both."""
    has_generation_tags: bool
    """Whether the template marks answers itself with `{% generation %}`."""
    media_pattern: re.Pattern[str] | None
    """Finds what the template writes for media."""
    media_ids: tuple[int, ...]
    """Tokens that stand for media or frame them."""
    placeholders: tuple[int, ...]
    """Those of them that are repeated for embeddings."""
    tails: dict[str, list[int]] = field(default_factory=dict)
    """Ids of the texts that stand between a chat token and an answer; filled as they are met."""


def per_template(learn: Callable[[Any], _Learned]) -> Callable[[Any], _Learned]:
    """Keep what is learned of a processor until its chat template changes."""
    kept: WeakKeyDictionary[Any, tuple[str | None, _Learned]] = WeakKeyDictionary()

    @wraps(learn)
    def look_up(processor: Any) -> _Learned:
        template = template_of(processor)
        known = kept.get(processor)
        if known is None or known[0] != template:
            known = kept[processor] = (template, learn(processor))
        return known[1]

    return look_up


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template wrote for one conversation."""

    text: str
    spans: list[tuple[int, int | None]] | None = None
    """Begin and end of each answer in characters, where the template marks them itself; None where it does not."""


def render_chat(processor: Processor, chat: ChatFormat, conversation: Conversation) -> Rendered:
    """Render one conversation, with the spans of the answers if the template has `{% generation %}`."""
    if not chat.has_generation_tags:
        return Rendered(render_template(processor, conversation))
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {key: value for key, value in tokenizer_of(processor).special_tokens_map.items() if isinstance(value, str)}
    render: Any = render_jinja_template  # returns texts and spans, whatever its annotation says
    texts, spans = render(
        conversations=[conversation], chat_template=template_of(processor), return_assistant_tokens_mask=True, **names
    )
    return Rendered(texts[0], [(int(begin), int(end)) for begin, end in spans[0]])


@per_template
def chat_format(processor: Processor) -> ChatFormat:
    """Return what the processor's template writes around turns."""
    tokenizer, template = tokenizer_of(processor), template_of(processor)
    added = added_tokens(tokenizer)
    form = _content_form(processor)
    header, scaffold = _scaffold(processor, form, added)
    stop = _first_added(scaffold[-1], added)
    openers = [] if stop is not None else _openers(processor, form, header)
    media = media_token_strings(processor)
    stops = _known((*STOP_TOKENS, stop, getattr(tokenizer, "eos_token", None)), added)
    written = {token for piece in scaffold for token in _added_in(piece, added)}
    chat = ({token for token in written if not _CONTENT_TOKENS.search(token)} | stops) - media
    chat_ids = {token: added[token] for token in chat}
    named = _known((getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")), added)
    plain = {text.strip() for text in (header, *openers) if not _added_in(text, added)}
    return ChatFormat(
        header=header,
        header_pattern=_header_pattern(header, chat, stops),
        closing=scaffold[-1],
        end_pattern=_alternation({opener.rstrip() for opener in openers}),
        chat_ids=chat_ids,
        stop_ids=frozenset(added[token] for token in stops),
        control=_alternation(chat | named | media | plain),
        chat_pattern=_alternation(chat, "({})"),
        content_form=form,
        media_pattern=_alternation(media),
        media_ids=tuple(sorted(media_token_ids(processor))),
        placeholders=tuple(sorted(placeholder_ids(processor))),
        has_generation_tags=template is not None and re.search(r"\{%-?\s*generation\b", template) is not None,
    )


def _known(tokens: Iterable[str | None], added: dict[str, int]) -> set[str]:
    return {token for token in tokens if token is not None and token in added}


def _scaffold(processor: Processor, form: ContentForm, added: dict[str, int]) -> tuple[str, list[str]]:
    """Return the header and what the template writes between and around contents; the last piece follows an answer."""
    probe = _chat(form, ("user", _USER[0]), ("assistant", _ANSWER[0]), ("user", _USER[1]), ("assistant", _ANSWER[1]))
    text = _try_render(processor, probe)
    pieces = _cut(text, (_USER[0], _ANSWER[0], _USER[1], _ANSWER[1]))
    if pieces is None:
        return "", [""]
    scaffold = [piece for role in ("system", "tool") for piece in _other_role(processor, form, role)] + pieces
    user_only = _cut(_try_render(processor, _chat(form, ("user", _USER[0]))), (_USER[0],))
    closing = user_only[1] if user_only else ""
    # Thinking templates open the last answer otherwise than earlier ones: what both share is the header.
    opening = _common_prefix(pieces[1], pieces[3])
    header = opening[len(closing) :] if opening.startswith(closing) else opening
    if not header.strip():
        header = opening
    if not _added_in(header, added):
        header = _back_to_token(opening, header, added)
    return header, scaffold


def _header_pattern(header: str, chat: Iterable[str], stops: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds headers; one that names its role in plain text may follow any chat token, or open the text."""
    solid = header.rstrip()
    if not solid:
        return None
    closes_turn_before = next((token for token in stops if solid.startswith(token)), None)
    if closes_turn_before is None:
        return re.compile(re.escape(solid))
    tokens = "|".join(map(re.escape, sorted(chat, key=len, reverse=True)))
    return re.compile(rf"(?:\A|{tokens})\s*{re.escape(solid[len(closes_turn_before) :].lstrip())}")


def _other_role(processor: Processor, form: ContentForm, role: str) -> list[str]:
    """Return what the template writes around a turn of that role: before the first user turn, or after an answer."""
    other, user, answer = (role, _USER[1]), ("user", _USER[0]), ("assistant", _ANSWER[0])
    turns = (other, user, answer) if role == "system" else (user, answer, other)
    return _cut(_try_render(processor, _chat(form, *turns)), tuple(text for _, text in turns)) or []


def _openers(processor: Processor, form: ContentForm, header: str) -> list[str]:
    """Return what may follow an answer: how each role opens its turn."""
    around = [_other_role(processor, form, role) for role in ("user", "tool")]
    return [header, *(pieces[2] for pieces in around if pieces)]


def _chat(form: ContentForm, *turns: tuple[str, str]) -> Conversation:
    as_string = form == "string"
    return [{"role": r, "content": text if as_string else [{"type": "text", "text": text}]} for r, text in turns]


def _content_form(processor: Processor) -> ContentForm:
    shows = {}
    forms: tuple[ContentForm, ContentForm] = ("list", "string")
    for form in forms:
        text = _try_render(processor, _chat(form, ("user", _USER[0]), ("assistant", _ANSWER[0])))
        shows[form] = text.count(_ANSWER[0]) == 1 and "'type'" not in text
    if shows["list"]:
        return "both" if shows["string"] else "list"
    return "string" if shows["string"] else "both"


def _try_render(processor: Processor, conversation: Conversation) -> str:
    try:
        return render_template(processor, conversation)
    except Exception:  # a template may refuse a role or a form of content: then it does not write it
        return ""


def _cut(text: str, sentinels: tuple[str, ...]) -> list[str] | None:
    """Return the pieces around the sentinels, or None when one does not show exactly once and in order."""
    if any(text.count(sentinel) != 1 for sentinel in sentinels):
        return None
    pieces = []
    for sentinel in sentinels:
        before, found, text = text.partition(sentinel)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, text]


def _back_to_token(opening: str, header: str, added: dict[str, int]) -> str:
    """Lengthen a header without tokens to the nearest token before it: text alone may also stand in an answer."""
    places = [opening.rfind(token) for token in _added_in(opening, added)]
    return opening[max(places) :] if places else header


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _added_in(text: str, added: Iterable[str]) -> list[str]:
    return [token for token in added if token and token in text]


def _first_added(text: str, added: Iterable[str]) -> str | None:
    found = _added_in(text, added)
    return min(found, key=text.find) if found else None


def _alternation(tokens: Iterable[str], form: str = "{}") -> re.Pattern[str] | None:
    longest_first = sorted((t for t in tokens if t), key=lambda token: (-len(token), token))
    return re.compile(form.format("|".join(map(re.escape, longest_first)))) if longest_first else None
