"""The README's pictures, which are of this version's output."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from honed.cli import column, command_line

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = ROOT / "docs/pictures"
REGENERATE = "run scripts/pictures"


def terminal() -> list[str]:
    """Return the lines of the picture of the terminal."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for each in ElementTree.parse(PICTURES / "terminal.svg").iter("{http://www.w3.org/2000/svg}text"):
        if (place := each.get("y")) is not None and each.text:
            lines.setdefault(float(place), []).append((float(each.get("x", 0)), each.text.replace("\xa0", " ")))
    return [" ".join(" ".join(text for _, text in sorted(words)).split()) for _, words in sorted(lines.items())]


def test_the_pictures_are_in_the_readme_and_load_nothing() -> None:
    for path in PICTURES.iterdir():
        assert f"](docs/pictures/{path.name})" in README, path
    text = (PICTURES / "terminal.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "@font-face" not in text


def test_the_terminal_shows_commands_and_columns_that_exist() -> None:
    lines = terminal()
    commands = [line.removeprefix("$ honectl ").split() for line in lines if line.startswith("$ honectl ")]
    assert [words[0] for words in commands] == ["check", "submit", "rerun", "list", "predictions"]
    for words in commands:
        assert command_line.parser().parse_args(words).verb == words[0], REGENERATE
    head = next(line for line in lines if line.startswith("id "))
    assert set(head.split()) <= {each.title for each in column.COLUMNS.values()}, REGENERATE
    assert "line 11: training.learning_rat: unknown key (did you mean learning_rate?)" in " ".join(lines)
