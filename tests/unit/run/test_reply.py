"""The preflight's answers: read from their lines, and written as ever."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from honed.check import datacheck, preflight
from honed.daemon.arrivals.acceptance import _job
from honed.daemon.arrivals.checks import Pending
from honed.job.arrival import Claim, Copy
from honed.job.plan_file import Earlier
from honed.run import reply
from honed.run.reply import Answer, Passed, Refused
from honed.run.snapshot import Missing
from honed.spec.config import Config, PolicyConfig
from honed.system.device import Device
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from zoo import plain

PLANS = Path(__file__).parents[2] / "data" / "plans"
NUMBERS = {"adapter": 1, "whole": 2, "deferred": 3, "fetched": 4, "refused": 5}
CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)


def line(name: str) -> bytes:
    return (PLANS / f"{name}.answer.jsonl").read_bytes()


def recorded(name: str) -> Answer:
    answer = reply.read(line(name), NUMBERS[name])
    assert answer is not None
    return answer


@pytest.mark.parametrize("name", NUMBERS)
def test_an_answer_that_was_read_is_written_the_same(name: str) -> None:
    made, before = json.loads(recorded(name).to_line()), json.loads(line(name))
    assert made == before
    assert list(made) == list(before)
    assert reply.read(line(name), 9) is None, "the answer to another request"


@pytest.mark.parametrize(
    "reasons", [{"load_dtype": 10**4000}, {"load_dtype": [-(2**60)]}, json.loads('{"a":' * 60 + "1" + "}" * 60)]
)
def test_a_plan_with_numbers_or_nesting_beyond_a_real_one_is_no_answer(reasons: dict[str, Any]) -> None:
    answer = json.loads(line("adapter"))
    answer["plan"]["precision"]["reasons"] = reasons
    assert reply.read(json.dumps(answer).encode(), NUMBERS["adapter"]) is None


def test_an_answer_has_its_types() -> None:
    passed, deferred, fetched, refused = map(recorded, ("adapter", "deferred", "fetched", "refused"))
    assert isinstance(passed, Passed)
    assert passed.plan.backend.name == "transformers"
    assert (passed.needs_fetch, passed.waits_for) == (None, {})
    assert isinstance(deferred, Passed)
    assert deferred.references == deferred.waits_for == {"adapter": "first"}
    assert not deferred.plan.is_decided
    assert isinstance(fetched, Passed)
    assert fetched.needs_fetch == Missing("org/name", "main")
    assert isinstance(refused, Refused)
    assert refused.error.code == "spec_invalid"
    assert refused.error.fix == {"training.learning_rat": None, "training.learning_rate": 1}


@pytest.mark.parametrize("name", ["adapter", "whole", "deferred"])
def test_the_daemon_makes_of_an_answer_the_plan_it_always_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = recorded(name)
    assert isinstance(answer, Passed)
    with monkeypatch.context() as context:
        context.setenv("TZ", "UTC")
        time.tzset()
        context.setattr(time, "time", lambda: 1763870000.25)
        claim = Claim(NUMBERS[name], PersonPath.of(Path("claimed/title.json"), 1))
        job = _job(Pending(claim, Copy(Path("spec.json"), 1000)), answer)
        made = answer.plan.accepted(job, answer.spec, Path("/var/lib/honed"))
    time.tzset()
    assert made.to_json() == (PLANS / f"{name}.plan.json").read_bytes()


#: The recorded jobs that do not depend on the libraries of the machine.
ASKED: dict[str, dict[str, Any]] = {
    "adapter": {
        "name": "ärgerlich",
        "eval_split": 0.2,
        "backend": "transformers",
        "training": {"learning_rate": 0.00021, "max_steps": 3},
    },
    "deferred": {"adapter": "job:first"},
    "fetched": {"base_model": "org/name"},
    "refused": {"training": {"learning_rat": 1}},
}


@pytest.mark.parametrize("name", ASKED)
def test_the_preflight_answers_as_it_always_did(name: str, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "root")
    layout.jobs_dir.mkdir(parents=True)
    model, rows = plain.write_base_model(tmp_path / "model"), plain.write_dataset(tmp_path / "rows.jsonl")
    document = plain.spec(model, rows, **ASKED[name])
    if "adapter" in document:
        del document["lora"]
    request = {
        "id": NUMBERS[name],
        "spec_name": "spec.json",
        "spec": base64.b64encode(json.dumps(document).encode()).decode(),
        "config": Config(policy=PolicyConfig(hub=True)).model_dump(mode="json"),
        "device": asdict(CPU),
        "uid": 0,
        "earlier": asdict(Earlier()),
    }
    answer = preflight._answer(json.dumps(request).encode(), layout, datacheck.Cache(), lambda _: None, io.StringIO())
    made, before = (without_words(text) for text in (answer.to_line(), line(name)))
    assert made.replace(str(tmp_path), "/tmp/recorded") == before


def without_words(text: bytes) -> str:
    """Return an answer without sentences, which may change, and without warnings, which depend on the machine."""
    answer = json.loads(text)
    for place in (answer, answer.get("plan", {})):
        place.pop("warnings", None)
    return re.sub(r'"[^"/]* [^"]*"', '"a sentence"', json.dumps(answer, separators=(",", ":")))
