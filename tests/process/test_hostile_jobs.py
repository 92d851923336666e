"""Texts of a job file, its data and its worker stay data wherever they are printed: no escape sequence or markup on a
terminal, no forged line in a log, no script on a page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest
from harness import Instance
from hostile import ALL, FORGED, LONG, MARKUP, TURN, check_lines, without_colours
from notified import Notified

from honed.job.job import State
from honed.run.outcome import SUCCEEDED
from waiting import wait_for
from zoo.fuzz import check_shown

#: A spec with the text in every string that a job file can contain.
PLACES = {
    "name": lambda text: {"name": text},
    "base_model": lambda text: {"base_model": f"/nowhere/{text}"},
    "base_model of a job": lambda text: {"base_model": f"job:{text}"},
    "model_type": lambda text: {"model_type": text},
    "revision": lambda text: {"revision": text},
    "chat_template": lambda text: {"chat_template": f"/nowhere/{text}"},
    "chat_template_kwargs": lambda text: {"chat_template_kwargs": {text: text}},
    "adapter": lambda text: {"adapter": f"/nowhere/{text}"},
    "target_modules": lambda text: {"lora": {"target_modules": [text]}},
    "target_modules, a pattern": lambda text: {"lora": {"target_modules": f"({text}"}},
    "modules_to_save": lambda text: {"lora": {"modules_to_save": [text]}},
    "rank_pattern": lambda text: {"lora": {"rank_pattern": {text: 3}}},
    "a data set's path": lambda text: {"datasets": [{"path": f"/nowhere/{text}"}]},
    "a data set's split": lambda text: {"datasets": [{"path": "/", "split": text}]},
    "a data set's columns": lambda text: {"datasets": [{"path": "ROWS", "columns": {text: text, "messages": text}}]},
    "media_dir": lambda text: {"datasets": [{"path": "ROWS", "media_dir": f"/{text}"}]},
    "prompts": lambda text: {"predictions": {"prompts": [text]}},
    "metrics": lambda text: {"predictions": {"metrics": [text]}},
    "guard": lambda text: {"guard": {"metric": text}},
    "output_dir": lambda text: {"output_dir": f"/proc/{text}"},
    "depends_on": lambda text: {"depends_on": [text]},
    "webhook": lambda text: {"notify": {"webhook": f"https://example.org/{text}"}},
    "mail": lambda text: {"notify": {"mail": f"{text}@example.org"}},
    "report_to": lambda text: {"report_to": [text]},
    "a word": lambda text: {"dtype": text},
    "a number": lambda text: {"priority": text},
    "an unknown key": lambda text: {text: 1},
    "an unknown key inside": lambda text: {"training": {text: text}},
    "a secret": lambda text: {"training": {"hub_token": text}},
}
#: In most places a control character alone causes a rejection, so the other specs contain none.
TEXTS = {"printable": f"{TURN} {MARKUP} %s %(x)s {{0}}", "forged": FORGED, "long": LONG[:50_000]}


def spec_bytes(instance: Instance, keys: dict[str, object]) -> bytes:
    text = json.dumps(
        {
            "base_model": str(instance.model),
            "datasets": [{"path": str(instance.dataset)}],
            "resources": {"gpus": 0},
            "lora": {"r": 4},
            **keys,
        }
    )
    return text.replace("ROWS", str(instance.dataset)).encode()


def honectl(instance: Instance, *arguments: str, check: bool = True) -> str:
    colours = {} if "--json" in arguments else {"FORCE_COLOR": "1"}
    done = instance.honectl(*arguments, env=os.environ | colours)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1) or not check, done.stderr
    return done.stdout + done.stderr


def test_whatever_stands_in_a_job_file_is_text_in_its_refusal_and_its_check(instance: Instance) -> None:
    path = instance.root / "all.hold.json"
    path.write_bytes(spec_bytes(instance, {"name": ALL, ALL: ALL}))
    paths = [path]
    for place, keys in PLACES.items():
        for name, text in TEXTS.items():
            path = instance.root / f"{re.sub('[^a-z]', '-', place)}.{name}.hold.json"
            path.write_bytes(spec_bytes(instance, keys(text)))
            paths.append(path)
    checked = honectl(instance, "check", *map(str, paths))
    check_lines(without_colours(checked))
    assert "BOLD" in checked  # it is quoted, as text
    assert max(map(len, checked.splitlines())) < 5000
    assert len(json.loads(honectl(instance, "check", "--json", *map(str, paths[:9])))) == 9
    for path in paths[::15]:
        check_lines(without_colours(honectl(instance, "plan", str(path), check=False)))
    for path in paths:
        path.rename(instance.incoming_dir / path.name)
    instance.start("--drain")
    instance.wait(deadline_sec=600)
    refused = instance.rejected()
    ended = list(instance.spool.all_jobs().values())
    assert len(refused) + len(ended) == len(paths)
    assert len(refused) > len(paths) / 2
    for reason in refused.values():
        check_lines(reason)
        assert len(reason) < 20_000
    check_lines(instance.log)
    assert max(map(len, instance.log.splitlines())) < 40_000
    shown = [[verb, str(job.id)] for job in ended[:3] for verb in ("show", "logs", "predictions", "report")]
    for arguments in (["list"], ["list", "--json"], *shown):
        check_lines(without_colours(honectl(instance, *arguments)))


@pytest.fixture
def systemd(instance: Instance) -> Iterator[Notified]:
    """What the daemon tells systemd."""
    made = Notified(instance.root / "notify")
    instance.environment["NOTIFY_SOCKET"] = str(made.path)
    yield made
    made.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_whatever_a_worker_says_is_text_wherever_it_is_shown(
    instance: Instance, systemd: Notified, is_shared: bool
) -> None:
    instance.configure(f"[policy]\nshare_results = {str(is_shared).lower()}\n")
    instance.drop("hostile", name="hostile-go")
    instance.start()

    def is_told() -> bool:  # then its words are in the status line, which is sent at the end of the turn
        return bool(instance.job("hostile-go")) and instance.client.ask("show", id="1")["progress"]["step"] == 3

    wait_for(is_told, what="its events", account=instance.account)
    instance.go("hostile-go")
    instance.wait_state("hostile-go", State.FAILED)
    # Its page is made a moment later.
    report = instance.layout.job(1).report_path
    wait_for(lambda: report.exists() and "failed" in report.read_text(), what="the report")
    assert instance.job("hostile-go").outcome != SUCCEEDED
    for arguments in (
        ["list"],
        ["list", "--json"],
        ["show", "1"],
        ["show", "1", "--json"],
        ["logs", "1"],
        ["logs", "1", "--raw"],
        ["watch", "1"],
        ["predictions", "1"],
        ["predictions", "1", "--json"],
        ["predictions", "1", "--jsonl"],
        ["predictions", "1", "--csv"],
        ["report", "1"],
        ["list", "--state", "failed"],
    )[: 1 if is_shared else None]:
        said = honectl(instance, *arguments)
        match arguments[-1]:
            case "--csv" | "--jsonl":  # for programs: the text as it is
                pass
            case "--raw":
                check_shown(without_colours(said))
            case _:
                check_lines(without_colours(said))
        if arguments[-1] == "--json":
            json.loads(said)
    instance.stop()
    check_lines(instance.log)
    assert "CRITICAL" in instance.log  # it is there, as text
    page = report.read_text()
    assert "<script" not in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    systemd.close()
    status = [line for line in systemd.messages if line.startswith("STATUS=")]
    assert any("running" in line for line in status)
    for line in status:
        check_shown(line)
        assert "\n" not in line
        assert len(line) < 3000
        assert is_shared or "hostile" not in line
    assert not is_shared or any("hostile-go (1)" in line for line in status)
