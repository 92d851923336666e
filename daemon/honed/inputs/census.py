"""Comparison of rows with each other: duplicates, and the order of roles.

Two rows are duplicates if a model would see the same, regardless of format, place and other columns.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from honed.inputs.row import Example

#: Bytes of a digest: among a billion different rows, the chance that two share one is 3 %.
DIGEST_BYTES = 8
#: Share of duplicate rows above which they are reported, and the smallest number of rows for that.
MANY_TWICE = 0.05
MIN_ROWS = 10

Order = Literal["swapped", "opens", "unanswered", "twice"]
#: Descriptions of an odd order of roles. The chat template decides whether it can be trained on.
ORDERS: dict[Order, str] = {
    "swapped": "begin with an assistant turn and end with a user turn, as if the two roles were swapped: the assistant "
    "turns are trained on",
    "opens": "begin with an assistant turn, which answers nothing but is trained on",
    "unanswered": "end with an unanswered turn, which is not trained on",
    "twice": "have two user turns in a row",
}


def digest(example: Example) -> bytes:
    """Return a digest of a row's content: the same for rows that a model would see as the same."""
    content = [
        example.kind,
        _stripped(example.messages),
        example.tools,
        example.prompt.strip(),
        example.completion.strip(),
        example.text.strip(),
        [(media.kind, *map(str, media.paths), _digest(media.data or b"").hex()) for media in example.media],
        *map(_stripped, example.others),
    ]
    return _digest(_as_json(content).encode(errors="replace"))


_as_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str).encode


def order(example: Example) -> Order | None:
    """Return the oddity in a conversation's order of roles, if any; of several the gravest."""
    roles = [message["role"] for message in example.messages if message["role"] not in ("system", "developer")]
    if example.kind != "messages" or not roles:
        return None
    opens, is_unanswered = roles[0] == "assistant", roles[-1] != "assistant"
    if opens and roles[-1] == "user":
        return "swapped"
    if is_unanswered:
        return "unanswered"
    if opens:
        return "opens"
    return "twice" if any(pair == ("user", "user") for pair in pairwise(roles)) else None


@dataclass
class Census:
    """The counts of a data set's rows, or of all rows that are trained on."""

    num_rows: int = 0
    num_twice: int = 0  #: rows that repeat an earlier one
    digests: Counter[bytes] = field(default_factory=Counter)
    orders: Counter[Order] = field(default_factory=Counter)
    firsts: dict[Order, str] = field(default_factory=dict)  #: the place of the first row of each

    def add(self, example: Example, place: str) -> None:
        self.num_rows += 1
        self.digests[key := digest(example)] += 1
        self.num_twice += self.digests[key] > 1
        if (odd := order(example)) is not None:
            self.orders[odd] += 1
            self.firsts.setdefault(odd, place)

    @property
    def has_many_twice(self) -> bool:
        """True if there are so many duplicates that they may be a mistake."""
        return self.num_rows >= MIN_ROWS and self.num_twice > MANY_TWICE * self.num_rows

    def num_in(self, other: Census) -> int:
        """Return the number of rows that also occur in the other census."""
        return sum(number for item, number in self.digests.items() if item in other.digests)

    def order_messages(self) -> list[str]:
        """Return descriptions of the odd orders, for the rows' owner."""
        return [
            f"{number} of {self.num_rows} rows {ORDERS[odd]}; the first: {self.firsts[odd]}"
            for odd, number in self.orders.most_common()
        ]


def firsts(examples: Iterable[Example]) -> list[int]:
    """Return per row the place of the first one with the same content."""
    first_of: dict[bytes, int] = {}
    return [first_of.setdefault(digest(example), place) for place, example in enumerate(examples)]


def together(first_of: Sequence[int], held: set[int]) -> set[int]:
    """Return the held-out places with duplicates kept on one side: the side of the first of them.

    `first_of` is as `firsts` returns it. Without duplicates the result is `held` itself. Every side keeps at least one
    distinct content.
    """
    num_distinct = len(set(first_of))
    if num_distinct == len(first_of):
        return held
    sides = {place for place in held if first_of[place] == place} or {first_of[min(held)]}
    if len(sides) == num_distinct:
        sides.discard(max(sides))
    return {place for place, first in enumerate(first_of) if first in sides}


def _stripped(value: Any) -> Any:
    match value:
        case str():
            return value.strip()
        case dict():
            return {key: _stripped(item) for key, item in value.items()}
        case list():
            return list(map(_stripped, value))
        case _:
            return value


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
