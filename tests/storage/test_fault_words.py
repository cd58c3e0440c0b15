"""What the client's exceptions are understood as, and what of them reaches a log."""

from __future__ import annotations

import pytest

from vlm_stream.errors import AccessError, ChangedObjectError, NotFoundError, StorageError
from vlm_stream.storage.remote import Fault, error_of, fault_of, fault_of_status


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (429, "", "throttled"),
        (503, "", "throttled"),
        (400, "<Code>SlowDown</Code>", "throttled"),
        (500, "", "transient"),
        (504, "", "transient"),
        (408, "", "transient"),
        (400, "<Code>RequestTimeout</Code>", "transient"),
        (400, "<Code>ExpiredToken</Code>", "refused"),
        (401, "", "refused"),
        (403, "", "refused"),
        (404, "", "missing"),
        (412, "", "changed"),
        (416, "", "past_end"),
    ],
)
def test_statuses(status, text, kind):
    assert fault_of_status(status, text).kind == kind
    whole = f"Generic S3 error: GET http://h/b in 1ms - Server returned non-2xx status code: {status} {text}"
    assert fault_of(RuntimeError(whole)).kind == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("no"), "missing"),
        (TimeoutError("late"), "transient"),
        (RuntimeError("Generic S3 error: HTTP error: request or response body error"), "transient"),
        (RuntimeError("Generic S3 error: Received non-partial response when range requested"), "no_ranges"),
        (RuntimeError("Received redirect without LOCATION, this normally indicates a wrong region"), "unknown"),
    ],
)
def test_other_exceptions(error, kind):
    assert fault_of(error).kind == kind


def test_texts_lose_signatures_and_dumps_and_keep_the_cause():
    text = (
        "HTTP error: <?xml?> GET https://host/path?sig=secret&x=1 failed\n\nDebug source:\nuri: https://h?sig=secret\n"
        'Os { code: 111, message: "Connection refused" }'
    )
    assert fault_of(RuntimeError(text)).text == (
        "HTTP error: <?xml?> GET https://host/path?... failed (Connection refused)"
    )


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("missing", NotFoundError, "There is nothing at s3://b/x. Check the bucket"),
        ("refused", AccessError, "refused the request for s3://b/x. Check the credentials"),
        ("changed", ChangedObjectError, "s3://b/x was replaced while it was being read"),
        ("untrusted", StorageError, "certificate of the server of s3://b/x is not trusted"),
        ("no_ranges", StorageError, "server of s3://b/x does not serve byte ranges"),
        ("throttled", StorageError, "s3://b/x could not be read or written in 2.5 s, with retries"),
        ("unknown", StorageError, "s3://b/x could not be read or written. The store said: text"),
    ],
)
def test_every_kind_has_its_sentence(kind, error, words):
    found = error_of(Fault(kind, "text"), "s3://b/x", 2.5)
    assert type(found) is error
    assert words in str(found)
