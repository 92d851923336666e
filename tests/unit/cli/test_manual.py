"""Man pages and completions contain every verb, option and key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import manual
import pytest

from honed.cli import command_line, job_numbers
from honed.job.job import State
from honed.spec.config import Config

CHECKOUT = Path(__file__).parents[3]


def complete(*words: str) -> list[str]:
    """Return bash's completions for the last word."""
    script = (
        f"source {CHECKOUT}/etc/completions/honectl.bash; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; honectl() {{ echo 7; echo 12; }}; "
        f"_shtab_honectl honectl {words[-1]!r} {words[-2]!r}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=CHECKOUT / "etc")
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_and_jobs() -> None:
    assert {name for name, _, _ in command_line.verbs(command_line.parser())} == set(complete("honectl", ""))
    assert complete("honectl", "su") == ["submit"]
    assert complete("honectl", "submit", "--w") == ["--wait"]
    assert complete("honectl", "submit", "honed.t") == ["honed.toml"]
    assert complete("honectl", "list", "--state", "") == [state.value for state in State]
    assert complete("honectl", "--root", "/srv", "show", "") == ["7", "12"]
    assert complete("honectl", "cancel", "7", "1") == ["12"]


def test_each_shell_asks_for_the_numbers_of_jobs_at_each_tab() -> None:
    texts = {shell: (CHECKOUT / f"etc/completions/honectl.{shell}").read_text() for shell in ("bash", "zsh", "fish")}
    assert set(job_numbers.STATES) == set(State)
    arguments = [action for _, _, verb in command_line.verbs(command_line.parser()) for action in verb._actions]
    num_places = sum(action.metavar == "ID" for action in arguments)
    assert texts["fish"].count(f'"({manual.JOBS})"') == num_places
    # zsh reads `(*):` as one argument, and `*:` as any number of them.
    assert '"(*)' not in texts["zsh"]
    assert texts["zsh"].count('"*:ID:_honectl_jobs"') > 5
    # Within double quotes, zsh would ask once, as it loads the file.
    assert texts["zsh"].count(':_honectl_jobs"') == num_places
    assert [texts[shell].count(f"$({manual.JOBS})") for shell in ("bash", "zsh")] == [1, 1]


def test_every_verb_and_key_is_in_its_page() -> None:
    pages = manual.man_pages([("[jobs]", "", type(Config().jobs))], [])
    for name, _, _ in command_line.verbs(command_line.parser()):
        assert f'.SS "{name}' in pages["honectl.1"]
    assert all(f".BR {key} " in pages["honed.toml.5"] for key in type(Config().jobs).model_fields)


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
@pytest.mark.parametrize("page", ["honed.8", "honectl.1", "honed.toml.5", "honed-job.5"])
def test_man_has_no_complaint(page: str) -> None:
    done = subprocess.run(
        ["man", "--warnings", "--local-file", CHECKOUT / "docs/man" / page], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
