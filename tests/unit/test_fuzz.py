"""Made-up files, events and requests: each is read or refused in a sentence, and nothing else comes of it.

The same ones each time; `scripts/fuzz` makes others, for as long as one likes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from zoo import fuzz
from zoo.fuzz import TARGETS, Target

#: Of those that take long, fewer.
FEW = {"events": 25, "model files": 60}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_it_is_fed_it_reads_or_refuses_in_a_sentence(target: Target) -> None:
    with fuzz.directory() as directory:
        pytest.importorskip("pyarrow") if target.name == "parquet" else None
        number = FEW.get(target.name, 150)

        @settings(max_examples=number, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(target.examples)
        def feed(example: object) -> None:
            target.run(directory, example)

        feed()
