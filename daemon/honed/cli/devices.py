"""Verbs that close devices, and open them again."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.job.progress import together
from honed.job.shape import DeviceRow


def moment(text: str) -> float:
    """Return the seconds since the epoch of `18:00` (the next one), `2026-12-24` or `2026-12-24 18:00`, in local time.
    Raises ArgumentTypeError."""
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            now = datetime.now()  # noqa: DTZ005 - local time, as in the hours of a device
            hour, minute = map(int, text.split(":"))
            at = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (at if at > now else at + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 18:00 or '2026-12-24 18:00'") from error


def change(instance: Instance, options: argparse.Namespace) -> int:
    """Drain, undrain, reserve or unreserve a device, and print what holds there from now on."""
    arguments: dict[str, object] = {}
    if options.verb == "drain":
        arguments = {"reason": options.reason, "now": options.now}
    elif options.verb == "reserve":
        arguments = {key: getattr(options, key) for key in ("owner", "job", "until", "for_sec")}
    rows: list[DeviceRow] = instance.ask(options.verb, id=options.device, **arguments)
    if options.json:
        terminal.say_json(rows)
        return 0
    closures = ((row["label"], [closure["detail"] for closure in row["closures"]] or ["open"]) for row in rows)
    for words in together((label, detail) for label, details in closures for detail in details):
        terminal.say(terminal.plain(words, limit=400))
    return 0
