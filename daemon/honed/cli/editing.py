"""`honectl edit`: another job file for a job that waits, from an editor, from --set or from a file.

An editor's text is kept where it was written until honed has taken it: a rejection names that path.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.cli import again, draft, submission, terminal
from honed.cli.instance import Instance
from honed.job import tree
from honed.job.comparison import differences, spec_of
from honed.job.editing import obstacle
from honed.spec import document, relative
from honed.system import untrusted
from honed.system.error import EnvironmentInvalidError, HonedError, UsageError, from_dict

if TYPE_CHECKING:
    from honed.check.checklist import Verdict
    from honed.job.shape import Edited, Shown

#: Editors of those who have set neither VISUAL nor EDITOR, the first that is there.
EDITORS = ("editor", "nano", "vi")


def edit(instance: Instance, options: argparse.Namespace) -> int:
    """Change the job file of a job that waits."""
    job = instance.show(options.id)
    if (refusal := obstacle(job["id"], job["name"], job["state"])) is not None:
        raise refusal
    if not instance.is_up:
        raise EnvironmentInvalidError(
            "honed is not running, and it checks an edit before it makes it", hint="start it first"
        )
    path = instance.layout.files(job["id"]).spec_path
    was = untrusted.read_plain(path)
    if options.set:
        text = _in_format(again.changed(again.content_of(instance, job), options.set), path.suffix)
        try:
            return _make(instance, options, job, was, text, Path.cwd())
        except HonedError as error:
            raise again.in_options(error, options.set) from error
    if options.file:
        return _make(instance, options, job, was, _from_file(options.file, path.suffix), options.file.absolute().parent)
    return _in_editor(instance, options, job, was, path.suffix)


def _make(instance: Instance, options: argparse.Namespace, job: Shown, was: bytes, text: bytes, base_dir: Path) -> int:
    """Have a job get this file. Raises the error with which the check or honed refuses it."""
    text, _ = relative.absolute(text, _suffix(instance, job), base_dir)
    if text == was:
        _say(options, job, "unchanged", {}, None)
        return 0
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        copy = Path(directory) / f"job-{job['id']}{_suffix(instance, job)}"
        copy.write_bytes(text)
        # honed checks it as the job's owner; what that user may read, another need not.
        verdict = draft.check_one(instance, copy) if job["uid"] == os.getuid() else None
    was_sum = hashlib.sha256(was).hexdigest()
    instance.ask("edit", id=str(job["id"]), data=base64.b64encode(text).decode(), was=was_sum)
    state = _settled(instance, job)
    now = instance.show(str(job["id"]))
    _say(options, now, state, differences([spec_of(job), spec_of(now)]), verdict)
    return 0


def _settled(instance: Instance, job: Shown) -> str:
    """Wait for honed's verdict on an edit. Returns `edited`, or `checking` if that takes long, as a fetch does. Raises
    the error of a refusal."""
    deadline = time.monotonic() + submission.VERDICT_TIMEOUT_SEC
    while (verdict := _verdict(instance, job))["state"] == "checking" and time.monotonic() < deadline:
        time.sleep(0.05)
    if verdict["error"] is not None:
        error = from_dict(verdict["error"])
        error.is_refusal = True
        raise error
    if verdict["state"] == "unknown" and len(instance.show(str(job["id"]))["edited_at"]) == len(job["edited_at"]):
        raise EnvironmentInvalidError(
            "honed refused the edit, and was started again since: the job is as it was",
            hint="the journal has the reason: journalctl -u honed",
        )
    return "checking" if verdict["state"] == "checking" else "edited"


def _verdict(instance: Instance, job: Shown) -> Edited:
    """Ask what became of an edit, which honed has kept."""
    try:
        verdict: Edited = instance.ask("edited", id=str(job["id"]))
    except EnvironmentInvalidError as error:
        raise EnvironmentInvalidError(
            "honed ended before it reported what became of the edit; when it runs again, it completes one that is not "
            "settled",
            hint=f"honectl show {job['id']}",
        ) from error
    return verdict


def _say(
    options: argparse.Namespace, job: Shown, state: str, changes: dict[str, list[Any]], verdict: Verdict | None
) -> None:
    warnings = list(verdict.warnings) if verdict is not None else []
    if options.json:
        terminal.say_json(
            {"id": job["id"], "name": job["name"], "state": state, "changes": changes, "warnings": warnings}
        )
        return
    words = {
        "unchanged": "nothing changed",
        "checking": "honed still checks the edit, or fetches what it names; the job does not start before",
    }
    terminal.say(f"job {job['id']} ({job['name']}): {words.get(state, 'edited')}")
    for key, (old, new) in changes.items():
        terminal.say(f"  {key}: {_value(old)} → {_value(new)}")
    for warning in warnings:
        terminal.say(f"  warning: {warning}", style="yellow")


def _value(value: Any) -> str:
    return terminal.plain("–" if value is None else json.dumps(value, ensure_ascii=False), limit=60)


# -- the text ----------------------------------------------------------------------------------------------------------


def _suffix(instance: Instance, job: Shown) -> str:
    return instance.layout.files(job["id"]).spec_path.suffix


def _in_format(content: dict[str, Any], suffix: str) -> bytes:
    """Return a job file of this content in the format of the job's own. Raises UsageError for TOML."""
    match suffix:
        case ".json":
            return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
        case ".toml":
            raise UsageError(
                "the job file is TOML, which honectl reads and does not write",
                hint="change it in an editor: honectl edit ID; or give a .toml file: --file FILE",
            )
        case _:
            return again.to_text(content)


def _from_file(path: Path, suffix: str) -> bytes:
    """Return a file's text, or its content in the format of the job's own file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if {path.suffix, suffix} in ({suffix}, {".yaml", ".yml"}):
        return data
    return _in_format(document.parse(data, path.suffix).data, suffix)


def _in_editor(instance: Instance, options: argparse.Namespace, job: Shown, was: bytes, suffix: str) -> int:
    """Let a person change the text until it is taken, or until they give up; then it is kept."""
    if options.json:
        raise UsageError("--json is for programs, which use no editor", hint="use --set KEY=VALUE or --file FILE")
    command = _editor()
    directory = Path(tempfile.mkdtemp(prefix="honectl-edit-"))
    path = directory / f"job-{job['id']}{suffix}"
    path.write_bytes(was)
    while True:
        status = subprocess.run([*command, str(path)], check=False).returncode
        try:
            text = path.read_bytes()
            if status:
                raise UsageError(f"the editor ended with status {status}, so nothing was changed")
            done = _make(instance, options, job, was, text, Path.cwd())
        except (HonedError, OSError) as error:
            if isinstance(error, HonedError) and not _is_kept(path, was):
                tree.clear(directory)
                raise
            rejection = error if isinstance(error, HonedError) else UsageError(f"{path}: {error.strerror}")
            if status or not _asks_again(rejection):
                kept = f"your text is in {path}: correct it, then honectl edit {job['id']} --file {path}"
                rejection.hint = f"{rejection.hint}; {kept}" if rejection.hint else kept
                raise rejection from None
        else:
            tree.clear(directory)
            return done


def _is_kept(path: Path, was: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() != was
    return False


def _asks_again(error: HonedError) -> bool:
    """Print why a text was rejected, and ask a person on a terminal to change it. Returns False if they do not."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    terminal.complain(error, prefix="honectl: ")
    print("Edit it again? [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"", "y", "yes"}


def _editor() -> list[str]:
    """Return the command of the person's editor."""
    for name in ("VISUAL", "EDITOR"):
        if command := shlex.split(os.environ.get(name, "")):
            return command
    if (editor := next(filter(None, map(shutil.which, EDITORS)), None)) is None:
        raise EnvironmentInvalidError(
            "there is no editor: VISUAL and EDITOR are not set", hint="set one, or use --set KEY=VALUE or --file FILE"
        )
    return [editor]
