"""Delivery of notices to chats, by Apprise in a child of honed-send.

The child is one process per notice: Apprise takes 46 MiB and has no deadline for a whole exchange. It gets the address
on its standard input, since the address is the chat's key. Of Apprise only the schemas that `notify.chat_schemas` lists
are enabled, and neither attachments nor configuration files: no address reads a file or loads another address. What
Apprise logs may repeat the address or the chat's words, so it is read for its cause here and not passed on.

Apprise answers yes or no. A no is always retried: it does not distinguish a wrong address from a chat that is down.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
from typing import Any

from honed.send import child, receipt
from honed.send.delivery import Verdict
from honed.send.notification import Notice
from honed.spec.config import NotifyConfig
from honed.system import installed, python
from honed.system.error import EnvironmentInvalidError

#: Seconds for the child's start and its imports, besides the delivery.
START_SEC = 30
_TAKEN = "taken"
#: Messages in Apprise's log, the most telling first, and our words for them.
_CAUSES = (
    (re.compile(r"honed: an HTML page"), "its response is an HTML page"),
    (re.compile(r"CERTIFICATE_VERIFY_FAILED"), "its certificate is not trusted"),
    (re.compile(r"\berror=(\d{3})\b"), "it responded with {0}"),
    (re.compile(r"did not finish within"), "no response in time"),
    (re.compile(r"Connection error", re.IGNORECASE), "it cannot be reached"),
)
#: The colour of a notice, by the event or the state that it reports.
_KINDS = {"recovered": "success", "degraded": "failure", "succeeded": "success", "failed": "failure"}


def deliver(notice: Notice, address: str, config: NotifyConfig) -> tuple[Verdict, str]:
    """Deliver to an Apprise URL. Raises EnvironmentInvalidError if Apprise is not installed."""
    if installed.version("apprise") is None:
        raise EnvironmentInvalidError(
            "Apprise is not installed in honed-send's environment: pip install 'apprise>=2.2,<3'"
        )
    payload = notice.payload
    order = {
        "address": address,
        "schemas": config.chat_schemas,
        "timeout_sec": config.timeout_sec,
        "text": str(payload["text"]).encode(errors="replace").decode(),
        "kind": "warning"
        if payload.get("remark")
        else _KINDS.get(str(payload.get("state", payload.get("event"))), "warning"),
    }
    known = ssl.get_default_verify_paths()  # as for webhooks: Apprise has authorities of its own
    try:
        done = subprocess.run(
            python.module("honed.send.chat"),
            input=json.dumps(order).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child.environment(NETRC=os.devnull, REQUESTS_CA_BUNDLE=known.cafile or known.capath or ""),
            timeout=config.timeout_sec + START_SEC,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict.LATER, "the delivery did not finish in time"
    said = done.stdout.decode(errors="replace")
    return (
        Verdict.TAKEN if said == _TAKEN else Verdict.LATER
    ), said or f"the delivery exited with status {done.returncode}"


def main() -> None:
    """Deliver what standard input orders, and print `taken` or the reason why not."""
    order = json.load(sys.stdin)
    signal.alarm(int(order["timeout_sec"]) + START_SEC)  # honed-send may be killed
    print(_send(**order), end="", flush=True)
    os._exit(0)  # Apprise's threads may still wait for an answer


def _send(*, address: str, schemas: list[str], timeout_sec: float, text: str, kind: str) -> str:
    import apprise
    import requests
    from apprise.manager_attachment import AttachmentManager
    from apprise.manager_config import ConfigurationManager
    from apprise.manager_plugins import NotificationManager

    _heed_pages(requests.Session)
    for closed in (AttachmentManager(), ConfigurationManager()):
        closed.remove(*closed.schemas())
    NotificationManager().enable_only(*schemas)
    heard = io.StringIO()
    logging.basicConfig(stream=heard, level=logging.DEBUG)
    apprise.NotifyBase.overflow_mode = apprise.OverflowMode.SPLIT  # a long message in parts, none cut
    asset = apprise.AppriseAsset(
        app_id="honed",
        app_desc="honed",
        app_url="",
        image_url_mask="",
        image_url_logo="",
        storage_mode="memory",
        http_redirects=False,
        allow_templates=False,
        service_timeout=timeout_sec,
    )
    receiver = apprise.Apprise.instantiate(address, asset=asset) if address.partition(":")[0] in schemas else None
    if receiver is None:
        return "its URL is not supported by Apprise, or refers to a file"
    name = str(receiver.service_name)
    if not receiver.verify_certificate or receiver.redirects:
        return f"{name}: its URL must not disable certificate checks or enable redirects"
    if len(receiver) > 1:
        return f"{name}: its URL has several recipients; put each in its own file"
    title, _, body = text.partition("\n")
    if not body or len(title) > receiver.title_maxlen:  # a longer title would be cut
        title, body = "", text
    service = apprise.Apprise(asset=asset)
    service.add(receiver)
    is_taken = service.notify(title=title, body=body, notify_type=kind, body_format=apprise.NotifyFormat.TEXT)
    return _TAKEN if is_taken else f"{name}: {_cause(heard.getvalue())}"


def _heed_pages(session_class: Any) -> None:
    """Have Apprise, which reads the status alone, see an HTML page as what 511 says: a proxy's."""
    send = session_class.send

    def heed(session: Any, request: Any, **given: Any) -> Any:
        response = send(session, request, **given)
        kind = response.headers.get("Content-Type", "")
        content = b"<html>" if given.get("stream") and kind.startswith(receipt.HTML_TYPES) else b""
        if response.ok and receipt.is_page(kind, content if given.get("stream") else response.content):
            logging.getLogger(__name__).debug("honed: an HTML page")
            response.status_code = http.client.NETWORK_AUTHENTICATION_REQUIRED
        return response

    session_class.send = heed


def _cause(heard: str) -> str:
    """Return why Apprise's log says no, in words of our own."""
    causes = ((words, pattern.search(heard)) for pattern, words in _CAUSES)
    return next((words.format(*match.groups()) for words, match in causes if match is not None), "rejected")


if __name__ == "__main__":
    main()
