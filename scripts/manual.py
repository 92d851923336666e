"""Man pages and shell completions, generated from the commands' parsers and the types of the configuration and the
spec.

docs/man/           honed.8  honed-web.8  honed-setup.8  honectl.1  honed.toml.5  honed-job.5
etc/completions/    honectl.bash  honectl.zsh  honectl.fish
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import shtab
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from honed import __version__
from honed.cli import command_line, setup
from honed.daemon import loop
from honed.page import server
from honed.spec import setting
from honed.spec.docstring import docstrings
from honed.spec.field import describe, keys, kinds
from honed.system.layout import Layout

#: A section's name, its note, and the model with its keys.
Section = tuple[str, str, type[BaseModel]]

_MADE = "Made by `python scripts/reference.py --write docs`."
_HONED = """\
.SH DESCRIPTION
.B honed
watches a spool directory and runs the training jobs dropped into it: one job per free GPU, by turns of its users.
systemd runs honed. A member of the group
.B honed-submit
copies a job file to
.IR /var/spool/honed/incoming .
honed checks the file and trains the job in its own unit,
.BI honed-job@ ID .service .
A job that cannot be trained is rejected before a model is loaded, with the cause and the remedy.
.PP
.nf
systemctl enable \\-\\-now honed
adduser anna honed\\-submit
cp capitals.yaml /var/spool/honed/incoming/
journalctl \\-u honed \\-f
.fi
"""
_SIGNALS = (
    (
        "SIGTERM, SIGINT",
        "Stop. Running job units continue or write a checkpoint (jobs.on_stop); child processes write one.",
    ),
    ("SIGHUP", "Reload the configuration. An invalid one is rejected and reported in the status."),
)
_UNITS = (
    (
        "honed.service",
        "The daemon. Jobs keep running while it is restarted, upgraded or killed; it then takes them over.",
    ),
    (
        "honed-job@ID.service",
        "One job. `systemctl stop` makes it write a checkpoint and holds it. Its status shows "
        "step, loss and ETA; `honectl logs --raw ID` prints its libraries' output.",
    ),
    (
        "honed-jobs.slice",
        "All jobs. Stopping it waits until each job has written its checkpoint. Set limits for all jobs here.",
    ),
    (
        "honed-check@UID.service",
        "Checks the job files of one user, with that user's permissions, before they are accepted.",
    ),
    ("honed-fetch@N.service", "Fetches models and data sets from the hub, if policy.hub allows it."),
    ("honed-send.service", "Sends predictions, metrics and notices to the addresses in honed.toml; idle without any."),
    ("honed-web.socket", "Starts honed-web.service, web pages and a read-only API: honed-web(8). Off until enabled."),
    (
        "honed-slurm.socket",
        "Starts honed-slurm@N.service, which submits each job of a shared instance to a Slurm cluster as its submitter "
        "(jobs.runner = slurm). Off until enabled.",
    ),
)
_EXIT = (
    ("0", "Normal exit."),
    ("73", "Full or read-only disk, with --drain or without systemd."),
    ("77", "Missing permissions."),
    ("78", "Invalid configuration or spool; fix it before the next start."),
)
_WEB = """\
.SH DESCRIPTION
.B honed\\-web
serves read-only web pages, JSON and Prometheus metrics, which follow jobs while they run. systemd starts it at the
first request, once
.I honed\\-web.socket
is enabled. It listens on 127.0.0.1:8470 and
.IR /run/honed\\-web.sock .
Over the unix socket, users can read their own jobs. Over loopback, clients can read everything that
policy.share_results opens to everybody. With the token, clients can read everything. If other machines can reach it,
it does not start without a token.
.PP
root, administrators, other users of the unix socket, clients with the token and clients without it each have their own
connections, so that no flood of one takes those of another. A client that gets none is told so with status 503.
"""
_WEB_FILES = (
    ("/etc/credstore/honed.web-token", "The token, mode 0600. web.token_file can name another file."),
    ("/openapi.json", "On the server: every path, with parameters and responses."),
)
_SETUP = """\
.SH DESCRIPTION
.B honed\\-setup
installs torch and all other packages that jobs need into a new environment, and has new jobs use it once it is
complete. Until then jobs are rejected, or wait if they are queued already. An interrupted installation is continued by
the next one. pip's configuration applies, and PIP_ variables. Running jobs keep the environment in which they started.
.PP
After an upgrade of the package,
.B honed\\-setup \\-\\-status
tells whether the new version has other packages.
"""
_SETUP_FILES = (
    ("/opt/honed-env/DEVICE-HASH", "An environment."),
    ("/opt/honed-env/current", "The one that new jobs use."),
)
_SETUP_EXIT = (
    ("0", "Success; with --status, an environment of the installed version is in use."),
    ("1", "With --status, there is none. Otherwise a fault of the machine, such as a full disk."),
    ("2", "Wrong usage."),
    ("69", "Packages could not be installed, or another honed-setup is running."),
    ("77", "Missing permissions."),
)
_HONECTL_EXIT = (
    ("0", "Success."),
    ("1", "A check or a job failed: a rejected file, a job that did not succeed."),
    ("2", "Wrong usage."),
    ("69", "Not available: honed, a journal, a browser."),
    ("77", "Missing permissions."),
)


def man_pages(config: Iterable[Section], spec: Iterable[Section]) -> dict[str, str]:
    """Return the text of each page, by its file name."""
    return {
        "honed.8": _honed(),
        "honed-web.8": _honed_web(),
        "honed-setup.8": _honed_setup(),
        "honectl.1": _honectl(),
        "honed.toml.5": _keys(
            "honed.toml",
            "configuration of honed",
            "honed reads @/etc/honed/honed.toml@, then @/etc/honed/honed.toml.d/*.toml@ by name; later files win. "
            "`systemctl reload honed` reloads them. An unknown key or an invalid value is rejected, and the current "
            "configuration stays in force; a key that only an earlier version read is ignored with a warning. A "
            "per-user instance (--user) reads ~/.config/honed/honed.toml.",
            config,
        ),
        "honed-job.5": _keys(
            "honed-job",
            "job file of honed",
            "A job is one file in YAML, JSON or TOML. Keys keep the spelling of the library that owns them. "
            "`honectl check FILE` reports errors, with key and line; `honectl plan FILE` shows what the job would do "
            "and why. Paths are absolute; `honectl submit` and `check` resolve relative ones against the file's "
            "directory. Do not put secrets into a job file.",
            spec,
        ),
    }


def _honed() -> str:
    layout = Layout(Path("/"))
    files = (
        (str(layout.config_path), "The configuration, honed.toml(5)."),
        (str(layout.spool_dir), "The spool; the directory of a job's entry is its state."),
        (str(layout.jobs_dir / "ID"), "Files of one job: plan, checkpoints, output, events."),
        (str(layout.database_path), "Metrics and predictions, SQLite."),
        (str(layout.cache_dir), "The model cache."),
    )
    return (
        "\n".join(
            [
                _head("honed", 8, "the fine-tuning daemon"),
                ".SH SYNOPSIS\n.B honed\n" + _usage(loop.parser()),
                _HONED.rstrip(),
                ".SH OPTIONS",
                *_options(loop.parser()),
                ".SH UNITS",
                *_tagged(_UNITS),
                ".SH SIGNALS",
                *_tagged(_SIGNALS),
                ".SH FILES",
                *_tagged(files),
                ".SH EXIT STATUS",
                *_tagged(_EXIT),
                ".SH SEE ALSO\n.BR honectl (1),\n.BR honed.toml (5),\n.BR honed\\-job (5),",
                ".BR journalctl (1),\n.BR systemctl (1)",
            ]
        )
        + "\n"
    )


def _honed_web() -> str:
    head = _head("honed-web", 8, "web pages and a read-only API of honed's jobs")
    exits = [item for item in _EXIT if item[0] != "73"]
    return _program("honed\\-web", head, server.parser(), _WEB, _WEB_FILES, exits, ".BR honed (8),\n.BR honed.toml (5)")


def _honed_setup() -> str:
    head = _head("honed-setup", 8, "install the training environment of honed's Debian package")
    also = ".BR honed (8),\n.BR honectl (1),\n.BR pip (1)"
    return _program("honed\\-setup", head, setup.parser(), _SETUP, _SETUP_FILES, _SETUP_EXIT, also)


def _program(
    name: str,
    head: str,
    parser: argparse.ArgumentParser,
    text: str,
    files: Iterable[tuple[str, str]],
    exits: Iterable[tuple[str, str]],
    also: str,
) -> str:
    """Return the page of a program: its options, its files, its exit statuses, and other pages."""
    parts = [head, f".SH SYNOPSIS\n.B {name}\n{_usage(parser)}", text.rstrip(), ".SH OPTIONS", *_options(parser)]
    parts += [".SH FILES", *_tagged(files), ".SH EXIT STATUS", *_tagged(exits), f".SH SEE ALSO\n{also}"]
    return "\n".join(parts) + "\n"


def _honectl() -> str:
    parser = command_line.parser()
    parts = [
        _head("honectl", 1, str(parser.description).rstrip(".").lower()),
        ".SH SYNOPSIS\n.B honectl\n[OPTION]... VERB [ARGUMENT]...",
        f".SH DESCRIPTION\n{_text(parser.description)}",
        ".I ID\nis a job's number, or its name if unambiguous.",
        ".SH OPTIONS",
        *_options(parser),
        ".SH VERBS",
    ]
    for name, words, verb in command_line.verbs(parser):
        arguments = " ".join(_argument(action) for action in verb._actions if not action.option_strings)
        parts += [
            f'.SS "{_text(f"{name} {arguments}".strip())}"',
            _text(words[0].upper() + words[1:] + "."),
            *_options(verb),
        ]
    parts += [".SH EXIT STATUS", *_tagged(_HONECTL_EXIT)]
    parts += [".SH SEE ALSO\n.BR honed (8),\n.BR honed\\-job (5)"]
    return "\n".join(parts) + "\n"


def _keys(name: str, what: str, introduction: str, sections: Iterable[Section]) -> str:
    parts = [_head(name, 5, what), f".SH DESCRIPTION\n{_text(introduction.replace('@', ''))}"]
    for title, note, model in sections:
        parts += [f'.SH "{_text(title.upper())}"', *([_text(" ".join(note.split()))] if note else [])]
        annotations, told = kinds(model), docstrings(model)
        for key, info in keys(model).items():
            if key in setting.tables_in(model):
                continue
            takes = describe(annotations[key]).removesuffix(", or null")
            parts += [f'.TP\n.BR {_text(key)} " ({_text(takes)}{_default(info)})"', _text(told.get(key))]
    parts += [".SH SEE ALSO\n.BR honed (8),\n.BR honectl (1)"]
    return "\n".join(parts) + "\n"


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "; required"
    if value is None or isinstance(value, BaseModel) or value in ([], {}):
        return ""
    return _text(f"; default {json.dumps(value, default=str)}").replace('"', '""')


def _head(name: str, number: int, what: str) -> str:
    title = f'.TH "{_text(name.upper())}" {number} "" "honed {__version__}"'
    return f'.\\" {_MADE}\n{title}\n.SH NAME\n{_text(name)} \\- {_text(what)}'


def _text(text: Any) -> str:
    """Return text escaped for roff: no control lines, hyphens that can be copied."""
    line = " ".join(str(text).split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + line if line.startswith((".", "'")) else line


def _tagged(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    for tag, words in items:
        yield f'.TP\n.B "{_text(tag)}"\n{_text(words)}'


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(f"[{_text(', '.join(action.option_strings))}]" for action in _shown(parser))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in _shown(parser):
        words = str(action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
        tag = ", ".join(action.option_strings) + (f" {_argument(action)}" if action.nargs != 0 else "")
        yield from _tagged([(tag, words)])


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse.SUPPRESS, "show this help message and exit", "show program's version number and exit")
    return [action for action in parser._actions if action.option_strings and action.help not in hidden]


def _argument(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    return {"+": f"{name}...", "?": f"[{name}]", "*": f"[{name}]..."}.get(str(action.nargs), name)


# -- completions ------------------------------------------------------------------------------------------------------


#: Prints the numbers of the jobs and those names that mean nothing to a shell, one per line.
JOBS = "honectl --job-numbers 2>/dev/null"
_ZSH_JOBS = f"""\
_honectl_jobs() {{
  compadd "$@" -- $({JOBS})
}}"""


def completions() -> dict[str, str]:
    """Return each shell's completion of honectl, by its file name."""
    jobs: dict[str, Any] = {**shtab.cmd(JOBS)}
    # shtab would ask once, when zsh loads the file.
    jobs |= {"zsh": "_honectl_jobs", "preamble": jobs["preamble"] | {"zsh": _ZSH_JOBS}}
    by_metavar = {"ID": jobs, "FILE": shtab.FILE, "DATA": shtab.FILE, "DIR": shtab.DIRECTORY, "MODEL": shtab.DIRECTORY}
    parser = command_line.parser()
    for item in (parser, *(verb for _, _, verb in command_line.verbs(parser))):
        for action in item._actions:
            if action.metavar in by_metavar:
                action.complete = by_metavar[action.metavar]  # type: ignore[attr-defined]
    made = {f"honectl.{shell}": f"{shtab.complete(parser, shell).rstrip()}\n" for shell in ("bash", "zsh", "fish")}
    # shtab 1.13 writes `(*):ID:`, which is one argument, for any number of them.
    made["honectl.zsh"] = re.sub(r'"\(\*\)::?', '"*:', made["honectl.zsh"])
    return made
