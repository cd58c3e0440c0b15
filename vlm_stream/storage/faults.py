"""What object-store clients raise -> what kind of fault it is -> the sentence that people read.

The client's message is the only place where a status code can be found. Its debug dump is cut off, and URLs lose their
query: a signed one would carry a secret into a log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vlm_stream.errors import AccessError, ChangedObjectError, NotFoundError, StorageError

if TYPE_CHECKING:
    from vlm_stream.errors import VlmStreamError

__all__ = ["Fault", "FaultKind", "error_of", "fault_of", "fault_of_status"]

FaultKind: TypeAlias = Literal[
    "throttled",  # 429, 503
    "transient",  # timeouts, resets, other 5xx, broken bodies
    "missing",  # 404
    "refused",  # 401, 403, 400
    "changed",  # 412
    "past_end",  # 416
    "untrusted",  # the server's certificate
    "no_ranges",  # the server sends whole objects only
    "unknown",
]

_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"(://[^\s?\"']+)\?[^\s\"']+")
_CAUSE = re.compile(
    r'message: "([^"]+)"|"((?:dns|tcp connect) error)"|(InvalidCertificate)|(TimedOut|IncompleteMessage)'
)
_MAX_TEXT = 400
_BY_NAME: dict[str, FaultKind] = {
    "PermissionDeniedError": "refused",
    "UnauthenticatedError": "refused",
    "PreconditionError": "changed",
    "NotSupportedError": "no_ranges",
}
_BY_STATUS: dict[int, FaultKind] = {404: "missing", 408: "transient", 412: "changed", 416: "past_end"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with one call."""

    kind: FaultKind
    text: str
    """What the store said, fit for a log."""


def fault_of(error: BaseException) -> Fault:
    """Return what an exception of obstore means."""
    text = _clean(str(error))
    if isinstance(error, FileNotFoundError):
        return Fault("missing", text)
    status = _STATUS.search(text)
    if status:
        return fault_of_status(int(status.group(1)), text)
    name = type(error).__name__
    if name in _BY_NAME:
        return Fault(_BY_NAME[name], text)
    if "non-partial response" in text:
        return Fault("no_ranges", text)
    if "InvalidCertificate" in text:
        return Fault("untrusted", text)
    if "HTTP error" in text or isinstance(error, (TimeoutError, ConnectionError)):
        return Fault("transient", text)
    return Fault("unknown", text)


def fault_of_status(status: int, text: str) -> Fault:
    """Return what an HTTP status means; some codes of S3 that pass come with a 400 or 403."""
    if status in (429, 503) or "SlowDown" in text:
        return Fault("throttled", text)
    if status >= 500 or "RequestTimeout" in text or "ThrottlingException" in text:
        return Fault("transient", text)
    return Fault(_BY_STATUS.get(status, "refused"), text)


def error_of(fault: Fault, url: str, seconds: float) -> VlmStreamError:
    """Return the error that tells people what happened at `url`, and what to check."""
    if fault.kind == "missing":
        return NotFoundError(
            f"There is nothing at {url}. Check the bucket, the path and the endpoint. The store said: {fault.text}"
        )
    if fault.kind == "refused":
        return AccessError(
            f"The store refused the request for {url}. Check the credentials (environment, profile or instance role), "
            f"their rights on this path, the region and the clock; public data may need anonymous=True. "
            f"The store said: {fault.text}"
        )
    if fault.kind == "changed":
        return ChangedObjectError(
            f"{url} was replaced while it was being read. Bytes of two versions must not be mixed; "
            f"read the dataset again once it is at rest. The store said: {fault.text}"
        )
    if fault.kind == "untrusted":
        return StorageError(
            f"The certificate of the server of {url} is not trusted, so nothing is read from it. Check the host name "
            f"and the clock; for a private authority set ca_file. The client said: {fault.text}"
        )
    if fault.kind == "no_ranges":
        return StorageError(
            f"The server of {url} does not serve byte ranges, and samples are read as ranges. "
            f"Use a server that answers 'Range' with 206, or copy the dataset. It said: {fault.text}"
        )
    if fault.kind in ("throttled", "transient"):
        return StorageError(
            f"{url} could not be read or written in {seconds:.1f} s, with retries. Check the network and the state of "
            f"the store, or raise max_retries and deadline_s. The last answer: {fault.text}"
        )
    return StorageError(f"{url} could not be read or written. The store said: {fault.text}")


def _clean(text: str) -> str:
    """Return the first sentence of a client's message, with the innermost cause out of its debug dump."""
    sentence, _, dump = text.partition("\n\nDebug source")
    causes = [next(filter(None, match.groups())) for match in _CAUSE.finditer(dump)]
    sentence = _QUERY.sub(r"\1?...", " ".join(sentence.split()))[:_MAX_TEXT]
    return f"{sentence} ({causes[-1]})" if causes else sentence
