"""Whether a response with a 2xx status comes from the receiver: the login page of a proxy has status 200, too.

an HTML page                               no: a proxy's, or a portal's
JSON that is cut                           no: the exchange was interrupted
a page's type, but no page: Slack's `ok`   yes
JSON lines, text, nothing at all           yes: webhooks may answer as they like
"""

from __future__ import annotations

import codecs
import http.client
import json
import re

HTML_TYPES = ("text/html", "application/xhtml+xml")
#: Tags of which each page has one; a fragment like `<p>Thanks</p>` may be the answer of a webhook.
_PAGE = re.compile(
    rb"<(?:!doctype\s+html|(?:html|head|body|title|meta|form|script|iframe|frameset)[\s/>])", re.IGNORECASE
)
#: What may stand before a page's first tag, whatever its declared type.
_BEFORE = re.compile(rb"(?:\s|<!--.*?-->|<\?xml[^>]*>)*", re.DOTALL)


def why_none(response: http.client.HTTPResponse, data: bytes, *, max_bytes: int) -> str | None:
    """Return why a response with a 2xx status is no receipt; None if it is one. At most `max_bytes` were read of it."""
    kind = response.getheader("Content-Type")
    if is_page(kind, data) or (len(data) >= max_bytes and _media_type(kind) in HTML_TYPES and _is_no_answer(data)):
        return "the response is an HTML page"
    if len(data) < max_bytes and _is_cut(_media_type(response.getheader("Content-Type")), data):
        return "the response is truncated or invalid"
    return None


def is_page(content_type: str | None, data: bytes) -> bool:
    """Return True for an HTML page, whatever its declared type."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", errors="replace").encode(errors="replace")
    data = data.removeprefix(codecs.BOM_UTF8)
    if _media_type(content_type) in HTML_TYPES:
        return _PAGE.search(data) is not None
    start = _BEFORE.match(data)
    assert start is not None
    return re.match(rb"<(?:!doctype\s+html|html[\s/>])", data[start.end() :], re.IGNORECASE) is not None


def _is_no_answer(data: bytes) -> bool:
    """Return True for the beginning of a page that has comments and white space alone: its first tag is behind it."""
    start = _BEFORE.match(data)
    assert start is not None
    rest = data[start.end() :]
    return not rest or rest.startswith(b"<!--")


def _media_type(content_type: str | None) -> str:
    return (content_type or "").partition(";")[0].strip().lower()


def _is_cut(media_type: str, data: bytes) -> bool:
    """Return True for JSON, also in lines, that ends early. Text of this type, like `ok`, is none that was cut."""
    is_json = media_type == "application/json" or media_type.endswith("+json")
    return is_json and data.lstrip()[:1] in {b"{", b"["} and not (_parses(data) or all(map(_parses, data.splitlines())))


def _parses(data: bytes) -> bool:
    try:
        json.loads(data or b"null")
    except (ValueError, RecursionError):
        return not data.strip()
    return True
