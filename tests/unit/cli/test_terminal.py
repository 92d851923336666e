"""Lines on a terminal, none of which wraps or is forged."""

from __future__ import annotations

import pytest

from honed.cli import terminal


def test_a_line_that_is_padded_to_the_width_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    width = terminal.console.width
    for text in (f"a{' ' * (width - 1)}job 9: succeeded", "\n".join(["a", "job 9: succeeded", "", "b"])):
        terminal.say(text)
        said = capsys.readouterr().out.splitlines()
        assert not [line for line in said if line.startswith("job 9")]
        assert "".join(said).replace(" ", "") == text.replace(" ", "").replace("\n", "")


def test_a_course_of_the_largest_numbers_is_a_line_of_bars() -> None:
    assert len(set(terminal.sparkline([-1.7e308, 1.7e308]))) == 2


def test_a_line_of_a_pipe_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/srv/" + "a directory/" * 100
    terminal.say(path)
    assert capsys.readouterr().out == f"{path}\n"
