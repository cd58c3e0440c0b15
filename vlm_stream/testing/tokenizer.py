"""A small byte-level BPE tokenizer, trained on the spot, and chat templates in the manner of the published ones.

`train_tokenizer`: special tokens -> a real fast tokenizer. Text is cut as the Qwen and GPT-4 tokenizers cut it, so that
the small vocabulary shows their habits: digits stand alone, a blank belongs to the word after it, newlines that meet
merge into one. The same special tokens give the same ids on every machine.

`write_template`: what a family writes -> a Jinja text. transformers compiles templates with `trim_blocks` and
`lstrip_blocks`, so newlines stand inside expressions. With `generation_tags=True` the assistant's answer and its end
token lie inside `{% generation %}`, from which transformers derives the mask of assistant tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

VOCABULARY_SIZE: Final = 700

_PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS: Final = (
    "You are a helpful assistant.\nuser\nassistant\nsystem\nmodel\n\n",
    "What is in this image? Describe the picture, please.\n",
    "Hello world! The quick brown fox jumps over the lazy dog.\n\n",
    "This video shows a street at night; it lasts 12.5 seconds.\n",
    "Which colour has the second square? It is red, and the first one is blue.\n",
    "<0.3 seconds> <1.5 seconds> 00:01 timestamp frame frames sampled from the video with\n\n",
    "Transcribe the audio clip into text, then answer the question step by step.\n",
    "1. The chart has three bars: 42, 17 and 3,650. 2. The table has two rows.\n",
)


@cache
def _trained(special_tokens: tuple[str, ...], bos_token: str | None) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PIECES), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE + len(special_tokens),
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 8, trainer)
    if bos_token is not None:
        bos_id = tokenizer.token_to_id(bos_token)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", pair=f"{bos_token} $A {bos_token}:1 $B:1", special_tokens=[(bos_token, bos_id)]
        )
    return str(tokenizer.to_str())


def train_tokenizer(
    special_tokens: Sequence[str],
    *,
    eos: str,
    pad: str,
    bos: str | None = None,
    add_bos: bool = False,
    named_tokens: Mapping[str, str] | None = None,
) -> Any:
    """Train a tokenizer whose first ids are the special tokens, in their order.

    Args:
        special_tokens: Tokens that are never cut, also when a user types them.
        eos: The one of them that ends a text.
        pad: The one of them that fills up rows.
        bos: The one of them that begins a text, if the family has one.
        add_bos: Whether encoding puts `bos` in front by itself, as Gemma's tokenizers do.
        named_tokens: Attributes that a processor reads from its tokenizer, such as `image_token`.

    Returns:
        A transformers fast tokenizer.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    options: dict[str, Any] = {"eos_token": eos, "pad_token": pad}
    if bos is not None:
        options["bos_token"] = bos
    if named_tokens:
        options["extra_special_tokens"] = dict(named_tokens)
    tokenizer = Tokenizer.from_str(_trained(tuple(special_tokens), bos if add_bos else None))
    make: Any = PreTrainedTokenizerFast  # untyped
    return make(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle:
    """What a family writes around turns and in the place of media (Jinja fragments; newlines as written)."""

    turn_begin: str  # opens a turn; `role` is in scope
    turn_end: str  # closes a turn; the assistant's counts as generated
    after_turn: str = ""  # stands between turns and is never generated
    generation_prompt: str = ""  # asks for an answer
    begin: str = ""  # stands before the first turn
    default_system: str = ""  # a whole turn that is written when the conversation does not begin with a system turn
    image: str = ""  # stands for an image
    video: str = ""  # stands for a video
    audio: str = ""  # stands for an audio clip
    assistant_name: str = "assistant"  # what the family calls the assistant's role


def _literal(text: str) -> str:
    return text.replace("\n", "{{ '\\n' }}")


def write_template(style: ChatStyle, *, generation_tags: bool = False) -> str:
    """Write the template of a style.

    >>> style = ChatStyle(turn_begin="[{{ role }}]", turn_end="[/]", image="<image>")
    >>> "<image>" in write_template(style)
    True
    """
    content = (
        "{% macro show(content) %}"
        "{% if content is string %}{{ content }}"
        "{% else %}{% for item in content %}"
        f"{{% if item['type'] == 'image' %}}{_literal(style.image)}"
        f"{{% elif item['type'] == 'video' %}}{_literal(style.video)}"
        f"{{% elif item['type'] == 'audio' %}}{_literal(style.audio)}"
        "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
        "{% endfor %}{% endif %}"
        "{% endmacro %}"
    )
    system = ""
    if style.default_system:
        system = (
            "{% if messages and messages[0]['role'] != 'system' %}" + _literal(style.default_system) + "{% endif %}"
        )
    turn = "{{ show(message['content']) }}" + _literal(style.turn_end)
    if generation_tags:
        turn = (
            "{% if message['role'] == 'assistant' %}"
            f"{{% generation %}}{turn}{{% endgeneration %}}"
            f"{{% else %}}{turn}{{% endif %}}"
        )
    role = f"{{% set role = '{style.assistant_name}' if message['role'] == 'assistant' else message['role'] %}}"
    turns = (
        "{% for message in messages %}"
        + role
        + _literal(style.turn_begin)
        + turn
        + _literal(style.after_turn)
        + "{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}" + _literal(style.generation_prompt) + "{% endif %}"
    return content + _literal(style.begin) + system + turns + prompt
