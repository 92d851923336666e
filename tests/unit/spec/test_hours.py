"""Hours of the week are open and closed at the right moments, also when the clock changes."""

from __future__ import annotations

import bisect
import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.spec import hours
from honed.spec.hours import Hours

BERLIN = ZoneInfo("Europe/Berlin")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: In each zone a day before a change of its clock: in Berlin by an hour at two, on Lord Howe by half an hour, in
#: Havana at midnight; Apia left out a whole day.
CHANGES = (
    ("Europe/Berlin", "2026-03-27"),
    ("Europe/Berlin", "2026-10-23"),
    ("Australia/Lord_Howe", "2026-04-03"),
    ("Australia/Lord_Howe", "2026-10-02"),
    ("America/Havana", "2026-03-06"),
    ("America/Havana", "2026-10-30"),
    ("Pacific/Apia", "2011-12-28"),
    ("UTC", "2026-06-01"),
)


def at(text: str, *, fold: int = 0, zone: ZoneInfo = BERLIN) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def is_open(texts: str | list[str], when: str, *, fold: int = 0) -> bool:
    return hours.parse(texts, BERLIN).is_open(at(when, fold=fold))


@pytest.mark.parametrize("days", ["Mon..Fri", "Mon-Fri", "mon,TUE,Wednesday,thu..fri", "Monday..Friday", "Fri,Mon-Thu"])
def test_a_night_belongs_to_the_day_on_which_it_begins(days: str) -> None:
    night = f"{days} 20:00-08:00"
    assert not is_open(night, "2026-11-23 07:59")  # Monday: Sunday's night is not among them
    assert not is_open(night, "2026-11-23 19:59:59")
    assert is_open(night, "2026-11-23 20:00")
    assert is_open(night, "2026-11-24 07:59:59")
    assert not is_open(night, "2026-11-24 08:00")
    assert is_open(night, "2026-11-28 07:59")  # Saturday: Friday's night
    assert not is_open(night, "2026-11-28 20:00")


def test_several_ranges_are_one_set_of_hours() -> None:
    texts = ["Mon..Fri 20:00-08:00", "Sat,Sun 00:00-24:00"]
    for when in ("2026-11-28 08:00", "2026-11-29 23:59", "2026-11-28 03:00"):
        assert is_open(texts, when)
    parsed = hours.parse(texts, BERLIN)
    assert parsed.next_change(at("2026-11-27 20:00")) == at("2026-11-30 00:00")  # they adjoin: no change in between
    assert parsed.next_change(at("2026-11-30 00:00")) == at("2026-11-30 20:00")


def test_hours_without_days_are_those_of_every_day_and_days_may_pass_the_weeks_end() -> None:
    assert all(is_open("8:00-9:00", f"2026-11-{day} 08:30") for day in range(23, 30))
    assert [is_open("Sat..Mon 08:00-09:00", f"2026-11-{day} 08:30") for day in range(23, 30)] == [
        True, False, False, False, False, True, True,
    ]  # fmt: skip


def test_what_is_always_open_never_changes() -> None:
    assert Hours().is_open(0.0)
    assert Hours().next_change(0.0) is None
    for whole in ("00:00-24:00", ["Mon..Fri 12:00-12:01", "00:00-12:00", "12:00-24:00"]):
        parsed = hours.parse(whole, BERLIN)
        assert parsed.is_open(at("2026-03-29 03:00"))
        assert parsed.next_change(at("2026-03-29 01:59")) is None


def test_a_time_that_the_clock_skips_is_the_moment_of_the_change() -> None:
    spring = at("2026-03-29 03:00")
    for text in ("01:00-02:30", "01:00-03:00", "01:00-02:00"):
        assert hours.parse(text, BERLIN).next_change(at("2026-03-29 01:30")) == spring
    assert hours.parse("02:30-04:00", BERLIN).next_change(at("2026-03-29 01:00")) == spring
    skipped = hours.parse("Sun 02:10-02:50", BERLIN)
    assert skipped.next_change(at("2026-03-29 00:00")) == at("2026-04-05 02:10")


def test_a_range_within_a_repeated_hour_is_open_once() -> None:
    assert is_open("02:10-02:50", "2026-10-25 02:30")
    assert not is_open("02:10-02:50", "2026-10-25 02:30", fold=1)
    for text, seconds in (("01:00-02:30", 5400), ("01:00-03:00", 3 * 3600), ("02:30-03:00", 5400)):
        parsed = hours.parse(text, BERLIN)
        begin = parsed.next_change(at("2026-10-25 00:00"))
        assert begin is not None
        assert parsed.next_change(begin) == begin + seconds


RANGES = st.builds(
    lambda days, begin, end: (frozenset(days), begin, end),
    st.sets(st.integers(0, 6), min_size=1),
    st.integers(0, 1439),
    st.integers(1, 1440),
).filter(lambda each: each[1] != each[2])


@settings(max_examples=40, deadline=None)
@given(st.lists(RANGES, min_size=1, max_size=3), st.sampled_from(CHANGES))
def test_the_hours_are_those_of_a_clock_that_is_read_every_minute(
    ranges: list[tuple[frozenset[int], int, int]], where: tuple[str, str]
) -> None:
    """The oracle reads the clock of the wall each minute, and ignores it while it shows a time it has shown before."""
    zone, day = ZoneInfo(where[0]), where[1]
    texts = [
        f"{','.join(DAYS[day] for day in sorted(days))} {begin // 60:02}:{begin % 60:02}-{end // 60}:{end % 60:02}"
        for days, begin, end in ranges
    ]
    start = int(datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC).timestamp())
    moments = range(start, start + 5 * 86400, 60)
    latest, expected = datetime.datetime.fromisoformat("2000-01-01"), []
    for moment in range(start - 3 * 3600, moments.stop, 60):
        latest = max(latest, datetime.datetime.fromtimestamp(moment, zone).replace(tzinfo=None, second=0))
        if moment >= start:
            minute, weekday = latest.hour * 60 + latest.minute, latest.weekday()
            expected.append(
                any(
                    (weekday in days and begin <= minute < (end if end > begin else 1440))
                    or ((weekday - 1) % 7 in days and end < begin and minute < end)
                    for days, begin, end in ranges
                )
            )
    parsed = hours.parse(texts, zone)
    changes = [moments[n] for n in range(1, len(expected)) if expected[n] != expected[n - 1]]
    for place in range(0, len(expected), 7):
        assert parsed.is_open(moments[place]) is expected[place], (texts, moments[place])
    for change in changes:
        assert parsed.is_open(change) is not parsed.is_open(change - 1), (texts, change)
    for place in range(0, len(expected), 601):
        following = bisect.bisect_right(changes, moments[place])
        if following < len(changes):
            assert parsed.next_change(moments[place]) == changes[following], (texts, moments[place])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected weekdays and a range of times"),
        ("Mon..Fri", "expected weekdays and a range of times"),
        ("20:00-08:00 Mon", "expected weekdays and a range of times"),
        ("Mon 20:00-08:00:00", "expected weekdays and a range of times"),
        ("Mo 20:00-08:00", "'Mo' is not a weekday"),
        ("Mon,,Tue 20:00-08:00", "'' is not a weekday"),
        ("Mon..Wed..Fri 20:00-08:00", "'Mon..Wed..Fri' is not a range of two weekdays"),
        ("25:00-26:00", "25:00 is not a time of day"),
        ("20:60-21:00", "20:60 is not a time of day"),
        ("20:00-24:01", "24:01 is not a time of day"),
        ("24:00-08:00", "24:00 can only be an end"),
        ("08:00-08:00", "a whole day is 00:00-24:00"),
    ],
)
def test_a_wrong_range_is_quoted_with_the_part_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^'") as caught:
        hours.parse([text], BERLIN)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty list"):
        hours.parse([])
