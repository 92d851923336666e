"""Check of a job's notification recipients: only those that the administrator allows in [notify].

honed-send has network access and honed's permissions, so a job file cannot name arbitrary addresses: a webhook must be
below an allowed URL or be a name from honed.toml, and a mail address must be in an allowed domain. Recipients are
checked twice: before a job is accepted, and again by honed-send, since the configuration may have changed.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from honed.spec.config import MAIL_ADDRESS, WEBHOOK_NAME, NotifyConfig
from honed.spec.spec import NotifySpec
from honed.system.error import EnvironmentInvalidError, SpecError

_PORTS = {"http": 80, "https": 443}
#: Parts of a path that some servers treat as a step upwards or a separator.
_ODD = re.compile(r"%2e|%2f|%5c|%25|%00|\\|(^|/)\.{1,2}(;|/|$)", re.IGNORECASE)


def check(notify: NotifySpec | None, config: NotifyConfig) -> None:
    """Raise SpecError if a job names a recipient that the administrator has not allowed."""
    if notify is None:
        return
    for key, why in (
        ("webhook", why_not_webhook(notify.webhook, config) if notify.webhook else None),
        ("mail", why_not_mail(notify.mail, config) if notify.mail else None),
    ):
        if why is not None:
            raise SpecError(
                f"notify.{key}: {why}",
                hint=f"remove it, or ask the administrator to allow it: {_KEYS[key]}",
                fix={f"notify.{key}": None} if notify.webhook and notify.mail else {"notify": None},
            )


_KEYS = {
    "webhook": "notify.allowed_webhooks or notify.webhook_files in honed.toml",
    "mail": "notify.allowed_mail_domains, smtp_host and mail_from in honed.toml",
}


def why_not_webhook(webhook: str, config: NotifyConfig) -> str | None:
    """Return the reason why a job may not use this webhook; None if it may."""
    if WEBHOOK_NAME.fullmatch(webhook):
        names = ", ".join(sorted(config.webhook_files)) or "none"
        return None if webhook in config.webhook_files else f"there is no webhook named {webhook!r}; there is {names}"
    if not config.allowed_webhooks and not config.webhook_files:
        return "jobs may not call any webhook"
    return None if is_below(webhook, config.allowed_webhooks) else "jobs may not call this URL"


def is_below(address: str, prefixes: list[str]) -> bool:
    """Tell whether a URL has the scheme, host and port of an allowed one, and is at or below its path."""
    try:
        wanted = urlsplit(address)
        where = _place(wanted)
        is_plain = address.isascii() and address.isprintable() and " " not in address and wanted.port != 0
        if not is_plain or wanted.username is not None:
            return False
        for prefix in map(urlsplit, prefixes):
            path = prefix.path or "/"
            below = path if path.endswith("/") else f"{path}/"
            if prefix.query and prefix.query != wanted.query:  # the query may be a key
                continue
            if _place(prefix) == where and (wanted.path == prefix.path or (wanted.path or "/").startswith(below)):
                return _ODD.search(wanted.path) is None
    except ValueError:  # an invalid port or IPv6 address
        return False
    return False


def _place(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)


def why_not_mail(address: str, config: NotifyConfig) -> str | None:
    """Return the reason why a job may not send mail to this address; None if it may."""
    if config.smtp_host is None or config.mail_from is None:
        return "sending mail is not configured"
    if not MAIL_ADDRESS.fullmatch(address):
        return "not an email address"
    domains = {domain.lower() for domain in config.allowed_mail_domains}
    domain = address.rpartition("@")[2].lower()
    return None if domain in domains else f"mail to {domain} is not allowed"


def target(webhook: str, config: NotifyConfig) -> tuple[str, str | None]:
    """Return the URL and the bearer token of a webhook; for a named one, the first two lines of its file.

    The URL of a named one may also be the Apprise URL of a chat. Raises EnvironmentInvalidError, whose message never
    contains them.
    """
    if not WEBHOOK_NAME.fullmatch(webhook):
        return webhook, None
    if webhook not in config.webhook_files:
        raise EnvironmentInvalidError(f"there is no longer a webhook named {webhook!r}", hint="notify.webhook_files")
    path = Path(config.webhook_files[webhook])
    address, *more = _lines(path, "the URL of the webhook")
    schema, _, rest = address.partition("://")
    is_chat = schema.lower() not in _PORTS
    if not address.isprintable() or " " in address or not (rest if is_chat else urlsplit(address).hostname):
        raise EnvironmentInvalidError(f"{path} contains no URL of a webhook", hint="write https://… on its first line")
    if is_chat and schema not in config.chat_schemas:
        raise EnvironmentInvalidError(f"{path} contains a URL whose scheme is not in notify.chat_schemas")
    if is_chat and path.stat().st_mode & 0o004:
        raise EnvironmentInvalidError(f"{path} can be read by everyone: chmod o-r {path}")
    return address, more[0] if more else None


def password(config: NotifyConfig) -> str:
    """Return the password of the mail server. Raises EnvironmentInvalidError."""
    if config.smtp_password_file is None:
        raise EnvironmentInvalidError("notify.smtp_user needs a password", hint="notify.smtp_password_file")
    return _lines(Path(config.smtp_password_file), "the password of the mail server")[0]


def _lines(path: Path, what: str) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise EnvironmentInvalidError(
            f"{what} in {path} cannot be read: {why}", hint="make it readable for honed"
        ) from None
    if not lines:
        raise EnvironmentInvalidError(f"{path} is empty", hint=f"it must contain {what}")
    return lines
