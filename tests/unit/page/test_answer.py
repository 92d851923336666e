"""Answers of honed-web."""

from __future__ import annotations

import json
import math

from honed.page import answer


def test_every_parser_can_read_an_answer() -> None:
    told = {"loss": [math.nan, -math.inf, 0.1, 10**30], "name": "é\ud800\u2028", "rows": ({"x": math.inf}, True)}
    made = answer.encode(told).decode()
    found = json.loads(made, parse_constant=lambda word: f"not JSON: {word}")
    assert found == {"loss": [None, None, 0.1, 10**30], "name": "é?\u2028", "rows": [{"x": None}, True]}
