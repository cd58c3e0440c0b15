"""The table of families: what a model family wants that others do not. The stream and the map-style collates read it.

A family is a row here: how one sample is encoded (`steps`), which keys its batches have (`finish`, `extras`), whether
its documents may share a row (`no_packing`), how its labels stand (`shifted`). What is not said is as transformers'
chat processors and causal models have it. `register_family` adds a row, `register_collate` a row that is nothing but a
function of conversations. `COLLATE_FNS` is the view of the table that NeMo Automodel knows.

Batches are made in two ways, which end alike: of conversations in one call of the processor (`Family.collate`), and of
encoded rows (`Family.collate_rows`).
"""

import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

import torch

from vlm_stream.collate.conversations import Example, conversation_of, mask_fake_images, process_batch
from vlm_stream.collate.family_steps import (
    add_decoder_inputs,
    add_input_mode,
    add_num_patches,
    call_phi4,
    gemma4_inject_thinking_prefix,
    name_omni_tensors,
    number_phi4_media,
    page_steps,
    prefix_steps,
    process_omni,
)
from vlm_stream.collate.kimi import add_kimi_grids, call_flat, call_medias
from vlm_stream.collate.media import cast_pixels, count_conversation_media, count_grids, merge_media
from vlm_stream.collate.rows import fit_to, pad_id_of, pad_rows, shift
from vlm_stream.encode import Steps, template_of
from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.keys import Sample

logger = logging.getLogger(__name__)

Batch: TypeAlias = dict[str, Any]
CollateFn: TypeAlias = Callable[..., Batch]
Finish: TypeAlias = Callable[[Batch, Any], Batch]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one model family wants."""

    name: str
    """How it is chosen: `collate="..."`."""
    processors: tuple[str, ...] = ()
    """Class names of its processors; none: it is chosen by name alone."""
    steps: Steps = field(default_factory=Steps)
    """How a sample is rendered, encoded and labelled."""
    template_steps: Steps | None = None
    """The same for a processor that was given a chat template, where the family's own has none."""
    finish: Finish | None = None
    """`(batch, processor)` -> the batch with keys that the model cannot do without."""
    extras: Finish | None = None
    """`(batch, processor)` -> the batch with keys that NeMo Automodel's collate function adds beside them."""
    pixel_dtype: torch.dtype | None = None
    """Type of pixels in the batches of that function; None: as the processor gives them."""
    counts_media: bool = True
    """Whether batches of conversations count the media of each row, and hide fake images."""
    no_packing: str = ""
    """Why its documents cannot share a row; empty: they can."""
    shifted: str = ""
    """Why labels are always shifted, whatever `hf_labels` says; empty: either form fits."""
    process: CollateFn | None = None
    """`(examples, processor, **options)` -> the padded batch with labels, not shifted; None: by `steps`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the processor when it is called with a batch."""
    function: CollateFn | None = None
    """`(examples, processor)` -> a batch: the family's collate function of conversations; None: `collate`."""
    only_function: bool = False
    """Whether that function is all that is known: it makes batches of conversations, and nothing else is asked."""
    is_listed: bool = True
    """Whether `COLLATE_FNS` has it under the names of its processors."""

    def steps_for(self, processor: Any) -> Steps:
        """Return the steps for a processor."""
        return self.template_steps if self.template_steps and template_of(processor) is not None else self.steps

    def collate(
        self,
        examples: Sequence[Example],
        processor: Any,
        max_length: int | None = None,
        edit: Callable[[Batch], Batch] | None = None,
        **options: Any,
    ) -> Batch:
        """Collate conversations; `edit` changes the batch before it is cut, `options` go to `process`."""
        if self.process is not None:
            batch = self.process(examples, processor, **options)
        else:
            batch = process_batch(examples, processor, self.options, steps=self.steps_for(processor), **options)
        if edit is not None:
            batch = edit(batch)
        if max_length is not None:
            batch = fit_to(batch, max_length, processor)
        batch = cast_pixels(batch, self.pixel_dtype)
        if self.counts_media:
            batch = mask_fake_images(batch, examples, processor)
            batch |= count_conversation_media([conversation_of(example, processor) for example in examples])
        return self.complete(shift(batch), processor)

    def collate_rows(
        self, rows: Sequence[Sample], processor: Any, max_length: int | None = None, *, shifted: bool = True
    ) -> Batch:
        """Collate encoded samples; fake images were masked when the samples were encoded."""
        tokens: Batch = dict(pad_rows(rows, pad_id=pad_id_of(processor)))
        if max_length is not None:
            tokens = fit_to(tokens, max_length, processor)
        if shifted:
            tokens = shift(tokens)
        return self.complete(tokens | merge_media(rows, pixel_dtype=self.pixel_dtype) | count_grids(rows), processor)

    def complete(self, batch: Batch, processor: Any) -> Batch:
        """Return the batch with all keys of the family."""
        for add in (self.finish, self.extras):
            batch = batch if add is None else add(batch, processor)
        return batch


_BF16: Final = torch.bfloat16
DEFAULT: Final = Family(name="default", processors=("default",), pixel_dtype=_BF16, extras=add_num_patches)
PLAIN: Final = Family(name="plain", is_listed=False)
ENCODED: Final = Family(name="encoded", pixel_dtype=_BF16, is_listed=False)
"""Encoded samples of any family, as NeMo Automodel's `pad_collate_fn` joins them."""
_DECODER: Final = "its decoder reads decoder_input_ids, and its loss does not shift"

_KIMI_K25: Final = Family(
    name="kimi_k25", processors=("Kimi_K25Processor",), options={"padding_side": "right"}, extras=add_kimi_grids
)
_NEMOTRON_OMNI: Final = Family(
    name="nemotron_h_omni", processors=("NemotronH_Omni_Reasoning_V3Processor",), pixel_dtype=_BF16
)
_PHI4: Final = Family(
    name="phi4_multimodal",
    processors=("Phi4MultimodalProcessor",),
    steps=Steps(call=call_phi4, placeholder=number_phi4_media),
    extras=add_input_mode,
    counts_media=False,
    is_listed=False,  # as in NeMo Automodel, where it is chosen explicitly
)
_AS_DEFAULT: Final = {
    "gemma3": "Gemma3Processor",
    "gemma3n": "Gemma3nProcessor",
    "gemma4": "Gemma4Processor",
    "gemma4_unified": "Gemma4UnifiedProcessor",
    "glm46v": "Glm46VProcessor",
    "idefics3": "Idefics3Processor",
    "internvl": "InternVLProcessor",
    "llama4": "Llama4Processor",
    "llava_next": "LlavaNextProcessor",
    "pixtral": "PixtralProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_omni": "Qwen2_5OmniProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "step3p7": "Step3p7Processor",
}
"""Families that the default function serves, as in NeMo Automodel: they are rows to have a name."""
_TABLE: Final = (
    DEFAULT,
    *(replace(DEFAULT, name=name, processors=(each,), is_listed=False) for name, each in _AS_DEFAULT.items()),
    PLAIN,
    ENCODED,
    Family(name="qwen2_5_vl", processors=("Qwen2_5_VLProcessor",)),
    Family(name="llava_onevision", processors=("LlavaOneVisionProcessor", "LlavaOnevisionProcessor")),
    Family(name="qwen3_omni_moe", processors=("Qwen3OmniMoeProcessor",), process=process_omni),
    Family(
        name="gemma4_prefix", steps=Steps(edit=gemma4_inject_thinking_prefix), pixel_dtype=_BF16, extras=add_num_patches
    ),
    Family(name="kimi_vl", processors=("KimiVLProcessor",), steps=Steps(call=call_flat)),
    _KIMI_K25,
    replace(
        _KIMI_K25, name="kimi_k25_remote", processors=("KimiK25Processor",), steps=Steps(call=call_medias), options={}
    ),
    _NEMOTRON_OMNI,
    replace(
        _NEMOTRON_OMNI,
        name="nemotron_omni_remote",
        processors=("NemotronH_Nano_Omni_Reasoning_V3Processor",),
        steps=Steps(edit=name_omni_tensors),
    ),
    Family(
        name="nemotron_parse",
        processors=("NemotronParseProcessor",),
        steps=page_steps(),
        finish=add_decoder_inputs,
        pixel_dtype=_BF16,
        no_packing="each page goes through its encoder, and one decoder row reads one page",
        shifted=_DECODER,
    ),
    _PHI4,
    replace(_PHI4, name="phi4_mm", processors=("Phi4MMProcessor",), finish=add_input_mode, extras=None),
    Family(
        name="paligemma",
        processors=("PaliGemmaProcessor",),
        steps=prefix_steps(),
        template_steps=Steps(),
        no_packing="its prefix is seen as a whole, which a packed row cannot say",
        is_listed=False,
    ),
)

_FAMILIES: Final = {family.name: family for family in _TABLE}


def register_family(family: Family) -> Family:
    """Add a family to the table, in place of one of the same name; its processors are then its own.

    Example:
        >>> from vlm_stream.encode import Steps
        >>> family = register_family(Family(name="my_model", processors=("MyModelProcessor",), steps=Steps()))
        >>> del _FAMILIES["my_model"]
    """
    if not family.name.isidentifier():
        raise ConfigError(f"a family is chosen by its name, and {family.name!r} is none; use letters and underscores")
    _FAMILIES[family.name] = family
    return family


def register_collate(class_name: str) -> Callable[[CollateFn], CollateFn]:
    """Register a collate function for a processor class, in place of any other.

    A stream gives it conversations whose media are bytes, in rows that are not packed.

    Example:
        >>> @register_collate("MyProcessor")
        ... def my_collate_fn(examples, processor):
        ...     return {}
        >>> del COLLATE_FNS["MyProcessor"]
    """

    def register(function: CollateFn) -> CollateFn:
        COLLATE_FNS[class_name] = function
        return function

    return register


class _CollateFns(MutableMapping[str, CollateFn]):
    """Class name of a processor -> its collate function: a view of the table."""

    def __getitem__(self, class_name: str) -> CollateFn:
        family = _by_class(class_name)
        if family is None or not family.is_listed:
            raise KeyError(class_name)
        return family.function or family.collate

    def __setitem__(self, class_name: str, function: CollateFn) -> None:
        register_family(Family(name=class_name, processors=(class_name,), function=function, only_function=True))

    def __delitem__(self, class_name: str) -> None:
        family = _FAMILIES[class_name]
        if not family.only_function:
            raise KeyError(class_name)
        del _FAMILIES[class_name]

    def __iter__(self) -> Iterator[str]:
        return iter({name: 0 for family in _FAMILIES.values() if family.is_listed for name in family.processors})

    def __len__(self) -> int:
        return sum(1 for _ in self)


COLLATE_FNS: Final = _CollateFns()
"""Collate functions by the name of the processor's class."""


def _by_class(class_name: str, *, encodes: bool = False) -> Family | None:
    """Return the family that has a processor of that class: what was registered last comes first."""
    for family in reversed(_FAMILIES.values()):
        if class_name in family.processors and not (encodes and family.only_function):
            return family
    return None


def family_of(processor: Any, *, encodes: bool = False) -> Family:
    """Return the family of a processor's class or of a class above it; `default` where the table names none.

    With `encodes`, families that are nothing but a function of conversations are left out.
    """
    found = (_by_class(kind.__name__, encodes=encodes) for kind in type(processor).__mro__)
    return next((family for family in found if family is not None), DEFAULT)


def find_family(name: str) -> Family:
    """Return a family by its own name or by that of a processor's class."""
    found = _FAMILIES.get(name) or _by_class(name)
    if found is None:
        known = sorted({*_FAMILIES, *COLLATE_FNS})
        raise ConfigError(
            f"collate={name!r} is no family and no form: {nearest_name(name, ['auto', 'neat', 'thd', *known])}"
        )
    return found


def function_of(*names: str) -> Callable[[_Function], _Function]:
    """Give families of the table the collate function of conversations that follows."""

    def give(function: _Function) -> _Function:
        _FAMILIES.update({name: replace(_FAMILIES[name], function=function) for name in names})
        return function

    return give


def get_collate(processor: Any) -> CollateFn:
    """Return the function of the processor's class; the default one (and a warning) for classes nobody registered."""
    name = type(processor).__name__
    if name not in COLLATE_FNS:
        logger.warning("No collate function is registered for %s; the default one is used.", name)
        name = "default"
    return COLLATE_FNS[name]
