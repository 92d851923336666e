"""What a turn of the loop does is bounded by the clock: on a busy machine the same call would do less."""

from __future__ import annotations

import pytest

from honed.daemon import housekeeper, rebuild
from honed.daemon.arrivals import incoming


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call do all of its work; a test of the bounds sets its own."""
    for module, names in (
        (incoming, ["LISTING_SEC"]),
        (housekeeper, ["BITE_SEC"]),
        (rebuild, ["START_SEC", "BITE_SEC"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 600.0)
