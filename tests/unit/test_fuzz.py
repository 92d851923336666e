"""Generated files, events and requests: each is read, or rejected with a message, and nothing else happens.

They are the same each time; `scripts/fuzz` generates others, for as long as wanted.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings

from zoo import fuzz
from zoo.fuzz import TARGETS, Target

#: Fewer examples for targets that take long.
FEW = {"events": 10, "model files": 25}
#: Faults that long runs have found, each fixed since.
FOUND: dict[str, tuple[str, object]] = {
    "a level that is a list": (
        "events",
        b'{"time": 1800000000.0, "event": "log", "level": [], "message": "x", "code": "mask_invalid"}\n',
    ),
    "a size of 400 digits": (
        "model files",
        ("model/config.json", fuzz.json_bytes({**fuzz.MODEL_CONFIG, "hidden_size": 10**400})),
    ),
    "NaN": ("spec values", {"base_model": "/m", "chat_template_kwargs": {"enable_thinking": math.nan}}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_it_is_fed_it_reads_or_refuses_in_a_sentence(target: Target) -> None:
    with fuzz.directory() as directory:
        pytest.importorskip("pyarrow") if target.name == "parquet" else None
        number = FEW.get(target.name, 50)

        @settings(
            max_examples=number, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(target.examples)
        def feed(example: object) -> None:
            target.run(directory, example)

        feed()


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    target_name, example = FOUND[name]
    (target,) = (each for each in TARGETS if each.name == target_name)
    with fuzz.directory() as directory:
        target.run(directory, example)
