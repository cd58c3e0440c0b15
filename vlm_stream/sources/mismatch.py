"""What does not map, and what happens then: `drop` the sample, `keep` what maps, or `raise`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from vlm_stream.errors import BadSampleError, ConfigError, SourceError, nearest_name

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation

__all__ = ["MISMATCHES_KEY", "Mismatch", "OnMismatch", "apply_policy", "check_policy", "show"]

OnMismatch: TypeAlias = Literal["drop", "keep", "raise"]

MISMATCHES_KEY: Final = "_mismatches"
"""Where `keep` notes what it left out: a list of `reason: sentence`."""


class Mismatch(NamedTuple):
    """One thing in an example that has no place in a conversation."""

    reason: str
    """Short stable code to count by."""
    fact: str
    """What was found, as the beginning of a sentence."""


def check_policy(on_mismatch: str) -> None:
    """Refuse a policy that does not exist."""
    if on_mismatch not in get_args(OnMismatch):
        raise ConfigError(
            f"on_mismatch is {on_mismatch!r}, which says nothing about bad samples; "
            f"{nearest_name(on_mismatch, get_args(OnMismatch))}"
        )


def apply_policy(
    conversation: Conversation, mismatches: list[Mismatch], on_mismatch: OnMismatch, where: str = ""
) -> list[str]:
    """Raise as the policy says, or return the notes of what is left out; nothing to keep is bad under every policy."""
    if not mismatches:
        return []
    if on_mismatch == "keep" and conversation:
        return [f"{reason}: {fact}" for reason, fact in mismatches]
    place = f"{where}: " if where else ""
    facts = "; ".join(fact for _, fact in mismatches)
    if on_mismatch == "raise":
        raise SourceError(
            f"{place}{facts}. The job ends here, as on_mismatch='raise' asks; mend the sample or use "
            "on_mismatch='drop'."
        )
    way_out = "mend it, or use on_mismatch='keep' for what does map" if conversation else "mend it"
    raise BadSampleError("convert", mismatches[0].reason, f"{place}{facts}. The sample is left out; {way_out}.")


def show(value: object) -> str:
    """Return a short form of a value for a sentence."""
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."
