"""The guide to a shared machine, followed as it says: each command prints what the page says."""

from __future__ import annotations

import machineguide
import pytest

import guide

pytestmark = pytest.mark.systemd


def test_each_command_of_the_guide_to_a_shared_machine_prints_what_the_page_says() -> None:
    machineguide.follow(guide.check)
