"""The guide to a shared machine, followed on a booted one, by root, anna and berta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from machine import CHECKOUT, ENVIRONMENT, Machine

import guide
from zoo.model import build_checkpoint, write_facts

PAGE = guide.DOCS / "guides/shared-machine.md"
PEOPLE = ("anna", "berta")


class People:
    """The machine and those who share it. All write the page's files with a relative name into their own homes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        build_checkpoint(machine.host_path("/srv/models/tiny"))
        data_dir = machine.host_path("/srv/data")
        data_dir.mkdir()
        write_facts(data_dir / "facts.jsonl", 16)
        machine.run("chmod", "-R", "a+rX", "/srv/models", "/srv/data")
        for user in PEOPLE:
            machine.add_user(user)
        machine.write("/etc/honed/honed.toml.d/10-device.toml", "[device]\ngpus = []\n")
        machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
        machine.run("systemctl", "enable", "--now", "honed")

    def write(self, file: guide.File) -> None:
        """Write a file of the page."""
        if file.name.startswith("/"):
            self._machine.write(file.name, file.text)
        else:
            for user in PEOPLE:
                self._machine.write(f"/home/{user}/{file.name}", file.text, user=user)

    def shell(self, user: str | None, command: str) -> str:
        """Run a command as a user, in their home."""
        assert user is not None
        home = "/root" if user == "root" else f"/home/{user}"
        words = ["sh", "-c", f"exec 2>&1\n{command}"]
        return self._machine.try_run(*words, user=None if user == "root" else user, cwd=home).stdout


def follow(act: Callable[..., Any]) -> None:
    """Follow the page on a machine of its own."""
    with Machine() as machine:
        people = People(machine)
        act(PAGE, people.write, people.shell)
