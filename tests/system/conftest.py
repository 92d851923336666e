"""One booted systemd per test file; skipped, with the reason, where none can be booted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machine import Machine, why_not


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share a machine, and follow one another on it, whatever the order of the files."""
    reason = why_not() if any(item.get_closest_marker("systemd") for item in items) else None
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.random_order(disabled=True))
        if reason is not None and item.get_closest_marker("systemd"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A fresh machine, honed not installed."""
    made = Machine()
    failed_before = request.session.testsfailed
    yield made
    if request.session.testsfailed > failed_before:
        print(made.try_run("journalctl", "--no-pager", "--lines=200").stdout)
    made.end()


@pytest.fixture(scope="module")
def model(machine: Machine) -> str:
    """A real base model, tiny, in the machine; /srv/data/facts.jsonl is something to train it on."""
    from zoo.model import build_checkpoint, write_facts

    build_checkpoint(machine.host_path("/srv/models/tiny"))
    data_dir = machine.host_path("/srv/data")
    data_dir.mkdir()
    write_facts(data_dir / "facts.jsonl", 16)
    machine.run("chmod", "-R", "a+rX", "/srv/models", "/srv/data")
    return "/srv/models/tiny"


@pytest.fixture(scope="module")
def people(machine: Machine) -> None:
    """honed, not yet started, alice and mallory, who may submit, eve, who may not, and what a job may name."""
    from zoo import plain

    machine.install()
    for user in ("alice", "mallory"):
        machine.add_user(user, "honed-submit")
    machine.add_user("eve")
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
