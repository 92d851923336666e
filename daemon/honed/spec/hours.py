"""Hours of the week during which a device may be used: `Mon..Fri 20:00-08:00`.

    [WEEKDAYS] HH:MM-HH:MM     weekdays as in systemd.time(7): Mon..Fri, Sat,Sun, Mon-Fri; without any, every day

Times are local. A range that ends at or before its beginning passes midnight and belongs to the day on which it begins.
A time is the first moment at which the local clock shows it or has passed it. So a time that a change of the clock
skips is the moment of the change, a repeated time is the first of the two, and ranges that adjoin leave no gap.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FULL = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_TIMES = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")
_MINUTES_PER_DAY = 24 * 60
#: Days ahead within which the hours change, if they ever do. More than a week: a range within a skipped hour is empty.
_HORIZON_DAYS = 16


@dataclass(frozen=True)
class Range:
    """A range of local time on some weekdays."""

    days: frozenset[int]  #: 0 is Monday
    begin: int  #: minutes after midnight
    end: int  #: minutes after the same midnight; above 1440 if the range ends on the next day


@dataclass(frozen=True)
class Hours:
    """Ranges of local time in a week; without any, all hours. `zone` is the machine's own time zone by default."""

    ranges: tuple[Range, ...] = ()
    zone: tzinfo | None = None

    def is_open(self, now: float) -> bool:
        """Return True if a moment, in seconds since the epoch, is within the hours."""
        return not self.ranges or any(begin <= now < end for begin, end in self._spans(now, 1))

    def next_change(self, now: float) -> float | None:
        """Return the next moment at which the hours begin or end, in seconds since the epoch; None if there is none."""
        if not self.ranges:
            return None
        opens = None
        until = None  # the end of the span that `now` lies in, as far as spans adjoin
        for begin, end in sorted(self._spans(now, _HORIZON_DAYS)):
            if end <= now:
                continue
            if until is None and begin > now:
                opens = begin
                break
            if until is not None and begin > until:
                break
            until = max(end, until or end)
        if opens is not None or until is None:
            return opens
        # Spans that reach the horizon without a gap are always open.
        horizon = self._moment(self._day(now) + timedelta(days=_HORIZON_DAYS), 0)
        return until if until < horizon else None

    def _spans(self, now: float, num_days: int) -> Iterator[tuple[float, float]]:
        """Yield the beginning and the end of every range that begins in the days around a moment."""
        today = self._day(now)
        for offset in range(-2, num_days + 1):
            day = today + timedelta(days=offset)
            for item in self.ranges:
                if day.weekday() in item.days:
                    begin, end = self._moment(day, item.begin), self._moment(day, item.end)
                    if begin < end:
                        yield begin, end

    def _day(self, now: float) -> date:
        return datetime.fromtimestamp(now, self.zone).date()

    def _moment(self, day: date, minutes: int) -> float:
        """Return the first moment at which the local clock shows a time of a day, or has passed it."""
        wanted = datetime.combine(day, time()) + timedelta(minutes=minutes)
        at = wanted.replace(tzinfo=self.zone, fold=0).timestamp()
        if datetime.fromtimestamp(at, self.zone).replace(tzinfo=None, fold=0) == wanted:
            return at
        # Within a gap, fold=1 gives a moment before the change of the clock, and fold=0 one after it.
        low, high = int(wanted.replace(tzinfo=self.zone, fold=1).timestamp()) - 1, int(at)
        while high - low > 1:
            middle = (low + high) // 2
            has_passed = datetime.fromtimestamp(middle, self.zone).replace(tzinfo=None) >= wanted
            low, high = (low, middle) if has_passed else (middle, high)
        return float(high)


def parse(texts: str | Sequence[str], zone: tzinfo | None = None) -> Hours:
    """Parse one range or several. Raises ValueError, which quotes the part that is wrong."""
    listed = (texts,) if isinstance(texts, str) else tuple(texts)
    if not listed:
        raise ValueError("an empty list: without the key a device is always open, and `honectl drain` closes it")
    return _parse(listed, zone)


@functools.cache
def _parse(texts: tuple[str, ...], zone: tzinfo | None) -> Hours:
    return Hours(tuple(map(_range, texts)), zone)


def _range(text: str) -> Range:
    match = _TIMES.search(text)
    if match is None or text[match.end() :].strip():
        raise ValueError(f"{text!r}: expected weekdays and a range of times, such as Mon..Fri 20:00-08:00")
    begin = _minutes(text, match[1], match[2])
    end = _minutes(text, match[3], match[4])
    if begin == end:
        raise ValueError(f"{text!r}: begins and ends at the same time; a whole day is 00:00-24:00")
    if begin == _MINUTES_PER_DAY:
        raise ValueError(f"{text!r}: 24:00 can only be an end; the next day begins at 00:00")
    days = text[: match.start()].strip()
    return Range(_weekdays(text, days), begin, end if end > begin else end + _MINUTES_PER_DAY)


def _minutes(text: str, hours: str, minutes: str) -> int:
    value = int(hours) * 60 + int(minutes)
    if int(minutes) > 59 or value > _MINUTES_PER_DAY:
        raise ValueError(f"{text!r}: {hours}:{minutes} is not a time of day")
    return value


def _weekdays(text: str, days: str) -> frozenset[int]:
    if not days:
        return frozenset(range(7))
    weekdays: set[int] = set()
    for part in days.split(","):
        first, *rest = (_weekday(text, name) for name in re.split(r"\.\.|-", part.strip()))
        if len(rest) > 1:
            raise ValueError(f"{text!r}: {part.strip()!r} is not a range of two weekdays")
        last = rest[0] if rest else first
        weekdays |= {day % 7 for day in range(first, last + 1 if last >= first else last + 8)}
    return frozenset(weekdays)


def _weekday(text: str, name: str) -> int:
    for names in (_DAYS, _FULL):
        if name.strip().lower() in names:
            return names.index(name.strip().lower())
    raise ValueError(f"{text!r}: {name.strip()!r} is not a weekday; expected Mon, Tue, Wed, Thu, Fri, Sat or Sun")
