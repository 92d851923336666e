"""honectl: submits jobs to honed, and shows their state and results.

command_line.py has the verbs. This module imports nothing before it is needed: a shell runs it at every TAB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from honed import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honectl` command."""
    match words := list(sys.argv[1:] if arguments is None else arguments):
        case ["--version"]:
            print(f"honectl {__version__}")
            return 0
        case ["--job-numbers"]:  # the shells' completions ask for it
            from honed.cli.job_numbers import job_numbers

            print(*job_numbers(), sep="\n")
            return 0
        case _:
            return _run(words)


def _run(words: list[str]) -> int:
    """Run a verb. Returns its exit status."""
    from honed.cli import command_line

    options = command_line.parser().parse_args(words)

    from honed.cli import terminal
    from honed.cli.instance import Instance
    from honed.system import layout
    from honed.system.error import HonedError

    try:
        status: int = command_line.find(options.run)(Instance(layout.of(options.root)), options)
    except HonedError as error:
        if getattr(options, "json", False):
            terminal.say_json({"error": error.as_dict()})
        else:
            terminal.complain(error, prefix="honectl: ")
        return terminal.status_of(error)
    except PermissionError as error:
        print(terminal.plain(f"honectl: {error.filename}: {error.strerror}"), file=sys.stderr)
        return os.EX_NOPERM
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
