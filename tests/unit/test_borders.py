"""The border between the daemon's side and the worker's, seen in the modules that a process has loaded."""

from __future__ import annotations

import argparse
import subprocess
import sys

from honed.cli import honectl


def modules_of(code: str) -> set[str]:
    """Return the modules that are loaded after this code has run in a process of its own."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_daemon_and_honectl_load_no_training_library() -> None:
    loaded = modules_of(
        "import honed.daemon.loop, honed.cli.doctor, honed.check.preflight\nfrom honed.cli import honectl\n"
        f"for place in {sorted(places())!r}: honectl.find(place)"
    )
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "transformers", "trl", "numpy"})


def test_the_daemon_and_honectl_load_no_web_server_and_no_templates() -> None:
    web = {"jinja2", "markupsafe", "starlette", "fastapi", "uvicorn", "prometheus_client"}
    assert modules_of("import honed.daemon.loop, honed.send.sender").isdisjoint(web)
    assert modules_of(
        f"from honed.cli import honectl\nfor place in {sorted(places())!r}: honectl.find(place)"
    ).isdisjoint(web)


def test_every_verb_of_honectl_is_where_its_line_says() -> None:
    assert all(callable(honectl.find(place)) for place in places())


def places() -> set[str]:
    verbs = next(
        action.choices.values()
        for action in honectl.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {verb.get_default("run") for verb in verbs}


def test_the_daemon_knows_no_model_and_no_data() -> None:
    """The daemon stays small and starts quickly: the code that judges a job is in the helper."""
    loaded = modules_of("import honed.daemon.loop")
    assert {
        name for name in loaded if name.startswith(("honed.inputs", "honed.text", "honed.plan", "honed.check"))
    } == set()
    assert loaded.isdisjoint({"honed.spec.spec", "honed.spec.training"})


def test_a_tab_of_honectl_loads_only_its_command_line() -> None:
    loaded = modules_of("from honed.cli import honectl\nhonectl.parser()")
    assert loaded.isdisjoint({"pydantic", "rich", "yaml", "honed.cli.instance", "honed.spec.config"})
