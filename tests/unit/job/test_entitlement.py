"""The tables of a user, of their groups, and of everybody: which of them counts, and who may use a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from honed.job.entitlement import MAX_QUEUED, Entitlements, class_of, require_class
from honed.spec.config import Config, load
from honed.system import access
from honed.system.access import Person
from honed.system.error import SpecError
from honed.system.layout import Layout

ANNA, BERTA, CARL = 1001, 1002, 1003


@pytest.fixture(autouse=True)
def people(monkeypatch: pytest.MonkeyPatch) -> None:
    """anna and berta are in research, anna in staff, too; carl is in neither."""
    groups = {"research": 50, "staff": 60}
    known = {ANNA: Person(ANNA, frozenset({50, 60}), "anna"), BERTA: Person(BERTA, frozenset({50}), "berta")}
    monkeypatch.setattr(access, "person", lambda uid: known.get(uid, Person(uid, frozenset(), f"user {uid}")))
    monkeypatch.setattr(access, "group_id", groups.get)


def of(config: dict[str, Any], uid: int) -> dict[str, Any]:
    parsed = Config.model_validate(config)
    return Entitlements(lambda: parsed).of(uid).model_dump(exclude_none=True)


def test_a_users_own_key_precedes_the_groups_and_that_one_everybodys() -> None:
    config = {
        "users": {
            "anna": {"max_running": 1},
            "@research": {"max_running": 2, "weight": 2.0},
            "@staff": {"weight": 3.0, "max_queued": 7},
            "*": {"max_running": 9, "weight": 0.5, "max_device_sec": 60.0},
            "1003": {"weight": 5.0},
        }
    }
    assert of(config, ANNA) == {"max_running": 1, "weight": 3.0, "max_queued": 7, "max_device_sec": 60.0}
    assert of(config, BERTA) == {"max_running": 2, "weight": 2.0, "max_device_sec": 60.0}
    assert of(config, CARL) == {"max_running": 9, "weight": 5.0, "max_device_sec": 60.0}
    assert of({}, ANNA) == {}
    assert Entitlements(Config).max_queued(ANNA) == MAX_QUEUED


def test_a_reload_is_looked_up_anew() -> None:
    config = [Config()]
    entitlements = Entitlements(lambda: config[0])
    assert entitlements.of(ANNA).max_running is None
    config[0] = Config.model_validate({"users": {"anna": {"max_running": 3}}})
    assert entitlements.of(ANNA).max_running == 3


def test_a_class_is_for_those_whom_it_names() -> None:
    config = Config.model_validate(
        {
            "classes": {
                "urgent": {"users": ["@staff", "1003"], "rank": 10},
                "normal": {"default": True, "rank": 1},
                "nobodys": {"users": []},
            }
        }
    )
    for uid, name in ((ANNA, "urgent"), (CARL, "urgent"), (BERTA, "normal"), (BERTA, None)):
        require_class(config, name, uid)
    with pytest.raises(SpecError, match="urgent is not for your jobs; your classes are normal") as refused:
        require_class(config, "urgent", BERTA)
    assert refused.value.fix == {"class": None}
    with pytest.raises(SpecError, match="ugent is not a class of this machine; your classes are normal, urgent"):
        require_class(config, "ugent", ANNA)
    with pytest.raises(SpecError, match="there are none for you"):
        require_class(Config(), "urgent", ANNA)
    assert [class_of(config, name).rank for name in ("urgent", "normal", None, "removed")] == [10, 1, 1, 1]
    assert class_of(Config(), None).rank == 0


def test_the_default_class_is_for_everybody(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    for text, told in (
        ("[classes.a]\ndefault = true\n[classes.b]\ndefault = true\n", "classes: a and b are the default"),
        ("[classes.a]\ndefault = true\nusers = ['anna']\n", "classes.a.users: the default class is everybody's"),
    ):
        layout.config_path.write_text(text)
        with pytest.raises(SpecError, match=told):
            load(layout)
