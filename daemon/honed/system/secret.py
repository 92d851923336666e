"""Secrets: one line of a file, which systemd provides as a credential, or which the configuration names.

They are read again each time, so that a change takes effect, and no error message contains them.
"""

from __future__ import annotations

import os
from pathlib import Path

from honed.system.error import EnvironmentInvalidError

ONE_LINE = "one line, without spaces in it"


def credential(*names: str) -> Path | None:
    """Return the path of the first of these credentials that systemd provides."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    places = [Path(directory) / name for name in names] if directory else []
    return next((place for place in places if place.exists()), None)


def read(path: Path, what: str, *, min_chars: int = 1, hint: str = ONE_LINE) -> str:
    """Return a file's secret, called `what` in errors. Raises EnvironmentInvalidError, with `hint` if invalid."""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not plain text"
        raise EnvironmentInvalidError(
            f"the {what} in {path} cannot be read: {why}", hint="it must be one line, readable for honed"
        ) from None
    if len(secret) < min_chars or not secret.isprintable() or " " in secret:
        least = f" of {min_chars} characters or more" if min_chars > 1 else ""
        raise EnvironmentInvalidError(f"{path} contains no {what}{least}", hint=hint)
    return secret
