"""The command line of honectl: its verbs, their options, and the function that runs a verb.

A new verb is a function of an Instance and the options, and a line in its group below. The module of a verb is imported
only when it runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from honed.cli import nearest
from honed.job.change import CHANGES
from honed.job.job import State
from honed.system import argument
from honed.system import layout as layouts

if TYPE_CHECKING:
    from honed.cli.instance import Instance

#: A verb: a function of an Instance and the options that returns the exit status, and its target, `module:function`.
Run = Callable[["Instance", argparse.Namespace], int]
Target = str


def find(target: Target) -> Any:
    """Import and return the function at `module:function`, a module of honed.cli."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"honed.cli.{module}"), name)


def later(target: Target) -> Callable[[str], Any]:
    """Return the conversion of an option at `module:function`, which is imported when the option is given."""

    def convert(text: str) -> Any:
        return find(target)(text)

    return convert


#: The option of the verbs that change a job file.
_SET: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "change a key, such as training.learning_rate=1e-4; null removes it; may be repeated",
}


class Add(Protocol):
    """Adds a verb with the common options."""

    def __call__(self, name: str, run: Target, words: str, *, as_json: bool = True) -> argparse.ArgumentParser: ...


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; scripts/manual.py makes the man page and the completions from it."""
    made = nearest.Parser(
        prog="honectl",
        description="Submit and monitor training jobs.",
        epilog="ID is a job's number, or its name if unambiguous: unfinished jobs take precedence over finished ones. "
        "Exit status: 0 success, 1 a check or a job failed, 2 wrong usage, sysexits codes for other errors.",
    )
    argument.add_root(made, metavar="DIR")
    own = layouts.user_root()
    made.add_argument("--user", action="store_const", dest="root", const=own, help="your per-user instance")
    argument.add_version(made)
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, run: Target, words: str, *, as_json: bool = True) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=words, description=words)
        verb.set_defaults(run=run)
        verb.add_argument("--root", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        verb.add_argument(
            "--user", action="store_const", dest="root", const=own, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        if as_json:
            verb.add_argument("--json", action="store_true", help="print JSON")
        return verb

    for group in (_add_beginnings, _add_files, _add_jobs, _add_changes, _add_devices, _add_results, _add_machine):
        group(add)
    return made


def verbs(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Return every verb with its help text and its own parser."""
    action = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    words = {choice.dest: str(choice.help) for choice in action._choices_actions}
    return [(name, words[name], parser) for name, parser in action.choices.items()]


def _add_beginnings(add: Add) -> None:
    """Add the verbs that make a job file."""
    verb = add(
        "init",
        "init:init",
        "write a commented job file for a model and data, one that fits this machine's memory; asks what is not given",
        as_json=False,
    )
    verb.add_argument("--model", metavar="MODEL", help="base model: a directory, or a hub id (org/name)")
    verb.add_argument(
        "--data",
        metavar="DATA",
        action="append",
        help="training data: a file, a directory or a hub id; may be repeated",
    )
    verb.add_argument(
        "--method",
        choices=["lora", "qlora", "full"],
        help="LoRA, LoRA on 4-bit weights, or full fine-tuning (default: LoRA, on 4-bit weights where it needs them)",
    )
    verb.add_argument("--name", help="name of the job (default: the first data set's)")
    verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="job file to write (default: NAME.yaml)")
    verb = add(
        "convert",
        "convert:convert",
        "convert settings or a command line of axolotl, LLaMA-Factory or TRL, an Unsloth script or an OpenAI request "
        "to a job file",
        as_json=False,
    )
    verb.add_argument(
        "file",
        metavar="FILE",
        help="a .yaml, .json, .py, .ipynb or .sh file, or in quotes the command line that starts the training, such as "
        "'trl sft --model_name_or_path …'; none of it is run",
    )
    verb.add_argument(
        "--from",
        dest="tool",
        choices=["axolotl", "llamafactory", "trl", "unsloth", "openai"],
        help="tool that the settings are of (default: recognized by their keys)",
    )
    verb.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a new file instead of printing")
    add("schema", "schema:schema", "print the JSON Schema of job files, for editors", as_json=False)


def _add_files(add: Add) -> None:
    """Add the verbs for job files."""
    verb = add(
        "submit",
        "submission:submit",
        "check and submit job files; relative paths become absolute",
    )
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE")
    verb.add_argument("--hold", action="store_true", help="hold the jobs until `honectl release`")
    verb.add_argument(
        "--stage",
        action="store_true",
        help="copy models and data that the worker cannot read to a directory that it can",
    )
    verb.add_argument(
        "--wait", action="store_true", help="show progress until the jobs end; exit with 1 unless all succeeded"
    )
    verb = add("check", "draft:check", "check job files as honed does before it accepts them")
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE")
    add("plan", "draft:plan", "show what a job would do and why; no model is loaded").add_argument(
        "file", type=Path, metavar="FILE"
    )
    verb = add(
        "preview", "draft:preview", "show rows exactly as they will be trained on, with masked and trained text marked"
    )
    verb.add_argument("file", type=Path, metavar="FILE")
    verb.add_argument("--rows", type=int, default=3, help="number of rows (default: %(default)s)")
    verb = add(
        "trial",
        "submission:try_out",
        "run a job on eight rows, ahead of the queue, and report learning, duration and memory",
    )
    verb.add_argument("file", type=Path, metavar="FILE")


def _add_jobs(add: Add) -> None:
    """Add the verbs that show jobs."""
    verb = add("list", "listing:list_jobs", "list jobs and their progress: the first of each kind, or with --json all")
    verb.add_argument("ids", metavar="ID", nargs="*", help="list only these jobs")
    verb.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in State],
        help="list only jobs in this state; may be repeated",
    )
    verb.add_argument("--all", action="store_true", help="list all jobs")
    verb.add_argument("--limit", type=int, metavar="N", help="list at most N of all jobs")
    verb.add_argument("--after", type=int, metavar="ID", help="list only jobs after this one in the list of all jobs")
    verb.add_argument(
        "--sort", metavar="KEY", help="sort by a column: score, elapsed, loss, submitted, …; --sort=-KEY reverses"
    )
    verb.add_argument(
        "--filter",
        action="append",
        metavar="TEST",
        help="list only jobs with KEY=VALUE, KEY~TEXT or KEY>NUMBER (also !=, <, >=, <=); may be repeated",
    )
    verb.add_argument(
        "-o", "--output", metavar="FORM", help="wide (every column), json, name, or columns=id,name,score"
    )
    verb.add_argument("--rejected", action="store_true", help="list rejected files instead of jobs")
    add("show", "listing:show", "show a job's details, or why a file was rejected").add_argument("id", metavar="ID")
    verb = add("logs", "joblog:logs", "show the log of a job's attempts; with --json one line of JSON per event")
    verb.add_argument("id", metavar="ID")
    verb.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")
    verb.add_argument("--raw", action="store_true", help="print the worker's own output, including its libraries'")
    verb.add_argument("-x", "--explain", action="store_true", help="add the journal's explanations of messages")
    verb = add(
        "watch", "following:watch", "show live progress of all jobs, or of one; with --json one line of JSON per change"
    )
    verb.add_argument("id", metavar="ID", nargs="?")


def _add_changes(add: Add) -> None:
    """Add the verbs that change jobs and the queue."""
    change = {
        name: add(name, "changes:change", CHANGES[name].words) for name in ("cancel", "hold", "release", "requeue")
    }
    verb = add("edit", "editing:edit", "change the job file of a queued or held job, in an editor or with --set")
    verb.add_argument("id", metavar="ID")
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--set", **_SET)
    how.add_argument("--file", type=Path, metavar="FILE", help="replace the job file with this one")
    verb = add("rerun", "again:rerun", "submit the job file of a job again, with changes, as a new job")
    verb.add_argument("id", metavar="ID")
    verb.add_argument("--set", **_SET)
    verb.add_argument("--name", help="name of the new job (default: that of the old one with a number)")
    verb.add_argument("--hold", action="store_true", help="hold the new job until `honectl release`")
    change |= {name: add(name, "changes:change", CHANGES[name].words) for name in ("pin", "unpin")}
    for verb in change.values():
        verb.add_argument("ids", nargs="+", metavar="ID")
    change["requeue"].add_argument("--from-start", action="store_true", help="discard its checkpoints and start over")
    verb = add(
        "prune",
        "pruning:prune",
        "remove finished jobs, their checkpoints, rejected files, or cached rows, and list them",
    )
    verb.add_argument("ids", nargs="*", metavar="ID", help="jobs to remove; without ID, all jobs beyond a limit")
    verb.add_argument(
        "--older-than",
        type=later("pruning:span"),
        metavar="AGE",
        help="remove jobs that finished more than AGE ago: 30d, 12h, 2w",
    )
    verb.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N")
    verb.add_argument(
        "--max-size",
        type=later("pruning:size"),
        metavar="SIZE",
        help="remove the oldest until the rest takes at most SIZE: 200G, 500M",
    )
    verb.add_argument(
        "--state",
        action="append",
        choices=[state.value for state in State if state.is_final],
        help="remove only jobs that ended in this state; may be repeated",
    )
    verb.add_argument(
        "--checkpoints",
        action="store_true",
        help="remove only checkpoints; without ID or --state, those of succeeded jobs",
    )
    verb.add_argument("--rejected", action="store_true", help="remove rejected files instead of jobs")
    verb.add_argument("--rows", action="store_true", help="remove encoded rows kept for later jobs, instead of jobs")
    verb.add_argument("--dry-run", action="store_true", help="show what would be removed; remove nothing")
    add("pause", "changes:pause", "stop starting jobs; running jobs continue", as_json=False)
    add("resume", "changes:pause", "start queued jobs again", as_json=False)


def _add_devices(add: Add) -> None:
    """Add the verbs that close devices."""
    verbs = {
        name: add(name, "devices:change", words)
        for name, words in (
            ("drain", "start no further jobs on a device; running ones end by themselves (administrators)"),
            ("undrain", "start jobs on a device again (administrators)"),
            ("reserve", "start only the jobs of one user, or one job, on a device (administrators)"),
            ("unreserve", "end the reservation of a device (administrators)"),
        )
    }
    for verb in verbs.values():
        verb.add_argument("device", metavar="DEVICE", help="GPU's index, UUID or its beginning, cpu, or all")
    drain, reserve = verbs["drain"], verbs["reserve"]
    drain.add_argument("--reason", metavar="TEXT", default="", help="reason, for those whose jobs wait")
    drain.add_argument("--now", action="store_true", help="let running jobs write a checkpoint and queue them")
    whom = reserve.add_mutually_exclusive_group(required=True)
    whom.add_argument("--owner", metavar="NAME", help="user whose jobs may start")
    whom.add_argument("--job", metavar="ID", help="job that may start")
    end = reserve.add_mutually_exclusive_group()
    end.add_argument(
        "--until", type=later("devices:moment"), metavar="TIME", help="end, in local time: 18:00, '2026-12-24 18:00'"
    )
    end.add_argument(
        "--for", dest="for_sec", type=later("pruning:span"), metavar="DURATION", help="duration: 45m, 12h, 2d"
    )


def _add_results(add: Add) -> None:
    """Add the verbs for a job's results."""
    verb = add(
        "predictions",
        "predictions:predictions",
        "show predictions for held-out examples, step by step, next to the reference",
    )
    verb.add_argument("id", metavar="ID")
    verb.add_argument("--sample", type=int, metavar="N", help="show only this example")
    verb.add_argument("--step", type=int, metavar="N", help="show only this step; -1 is the last")
    forms = verb.add_mutually_exclusive_group()
    forms.add_argument("--jsonl", action="store_true", help="print one line of JSON per row")
    forms.add_argument("--csv", action="store_true", help="print CSV with a header")
    verb = add("diff", "contrast:diff", "show the differences of two jobs: spec, plan, data, versions, scores")
    verb.add_argument("first", metavar="ID")
    verb.add_argument("second", metavar="ID")
    verb = add(
        "compare", "contrast:compare", "show jobs side by side: specs, scores, losses, answers to the same examples"
    )
    verb.add_argument("ids", nargs="+", metavar="ID")
    verb.add_argument(
        "--samples", type=int, default=5, metavar="N", help="number of examples (default: %(default)s); --json has all"
    )
    verb = add("report", "listing:report", "print the path of a job's report, or of the index of all jobs")
    verb.add_argument("id", metavar="ID", nargs="?")
    verb.add_argument("--open", action="store_true", help="also open it in a browser")
    verb = add(
        "web",
        "web:web",
        "print a link to live pages of your own instance, open it in a browser, and serve them until interrupted",
        as_json=False,
    )
    verb.add_argument("--no-open", dest="open", action="store_false", help="open no browser")
    verb.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")


def _add_machine(add: Add) -> None:
    """Add the verbs for the machine."""
    verb = add("sandbox", "sandbox:sandbox", "give the units access to policy.allowed_paths (as root)", as_json=False)
    verb.add_argument("--dry-run", action="store_true", help="print the drop-ins; write nothing")
    add(
        "metrics",
        "metrics:metrics",
        "print the metrics of /metrics in Prometheus' text format, also while honed-web is off",
        as_json=False,
    )
    add("doctor", "doctor:doctor", "check this machine: versions, GPU, disk, permissions")
