"""The commands of honectl that the pages of docs/ and the README name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from honed.cli import command_line

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_FENCE = re.compile(r"^```(?:sh|console|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^(?:\w*\$ )?(honectl .*)$", re.MULTILINE)
_WORDS = re.compile(r"`(honectl [^`]+)`")
#: What a text may leave out of a command: its file or job, and the value of an option that it explains.
_LEFT_OUT = re.compile(r"arguments are required: (FILE|ID|DEVICE)|expected one argument")


def commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = [line for fence in _FENCE.findall(text) for line in _LINE.findall(fence)] + _WORDS.findall(text)
    return [re.split(r" \| | >|; ", command)[0] for command in found]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_honectl_takes_each_command_that_a_page_names(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.parser()
    for command in commands(page):
        try:
            parser.parse_args(shlex.split(command, comments=True)[1:])
        except SystemExit as end:
            said = capsys.readouterr().err
            assert not end.code or _LEFT_OUT.search(said), f"{command}: {said}"
