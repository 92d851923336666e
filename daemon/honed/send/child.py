"""The environment of honed-send's children, `wandb sync` and Apprise."""

from __future__ import annotations

import os
import re

#: Variables that a child does not need: other secrets, systemd's notification socket, and the child's own settings.
_HIDDEN = re.compile(r"JOB_TOKEN|CREDENTIALS_DIRECTORY|NOTIFY_SOCKET|WATCHDOG_.*|HF_TOKEN|WANDB_.*|APPRISE_.*")


def environment(**more: str) -> dict[str, str]:
    """Return our environment without secrets and settings, and with `more`."""
    return {name: value for name, value in os.environ.items() if not _HIDDEN.fullmatch(name)} | more
