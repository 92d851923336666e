"""The parser of the command line, which answers a wrong verb or option with the right one: the nearest name, or what
other tools' words mean here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

#: What verbs of Slurm, of shells and of trainers mean here.
MEANINGS = {
    "honectl cancel ID": ("stop", "kill", "scancel", "abort", "terminate", "qdel"),
    "honectl prune ID": ("rm", "remove", "delete", "clean", "purge"),
    "honectl list": ("squeue", "ps", "ls", "jobs", "queue", "qstat", "sacct", "status", "stat", "history"),
    "honectl doctor": ("sinfo", "nvidia-smi", "gpus", "nodes", "health", "diagnose"),
    "honectl submit FILE": ("train", "run", "start", "sbatch", "srun", "add", "queue-job", "launch", "qsub", "sft"),
    "honectl logs -f ID": ("tail", "follow", "attach", "journal"),
    "honectl logs ID": ("log", "output", "cat"),
    "honectl show ID": ("info", "describe", "inspect", "scontrol", "get", "sstat", "cat-job"),
    "honectl watch": ("top", "monitor", "live", "htop"),
    "honectl check FILE": ("validate", "lint", "verify", "test"),
    "honectl plan FILE": ("dry-run", "dryrun", "explain", "estimate"),
    "honectl preview FILE": ("preprocess", "data", "dataset", "inspect-data"),
    "honectl rerun ID": ("resubmit", "again", "copy", "clone"),
    "honectl edit ID": ("update", "modify", "change", "set"),
    "honectl requeue ID": ("retry", "restart"),
    "honectl release ID": ("unhold", "unpause"),
    "honectl --version": ("version",),
    "honectl --help": ("help",),
}
_BY_WORD = {word: meant for meant, words in MEANINGS.items() for word in words}
#: The same of options.
_OPTIONS = {
    "--follow": ("--tail",),
    "--filter": ("--where", "--grep", "--name"),
    "--sort": ("--order-by", "--order", "--sort-by", "-S"),
    "--output": ("--format", "--columns", "-O", "--out"),
    "--set": ("--override", "--param"),
    "--json": ("--yaml", "--jsonl"),
    "--state": ("--status", "--states", "-t"),
    "--limit": ("-n", "--max", "--head", "--tail-n"),
    "--hold": ("-H", "--held"),
    "--wait": ("-W", "--block"),
}
_BY_OPTION = {word: meant for meant, words in _OPTIONS.items() for word in words}
_CHOICE = re.compile(r"argument VERB: invalid choice: '(?P<word>.*?)' \(")


class Parser(argparse.ArgumentParser):
    """A parser whose refusals end with a hint."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the words; one that no verb takes is rejected with the nearest option."""
        options, extra = self.parse_known_args(args, namespace)
        if extra:
            known = self._options_of(getattr(options, "verb", None))
            hints = [hint for word in extra if (hint := _option_hint(word, known))]
            if getattr(options, "verb", None) == "convert":
                hints = ["a command line is one word, in quotes: honectl convert 'trl sft --model_name_or_path …'"]
            self._refuse(f"unrecognized arguments: {' '.join(extra)}", hints)
        return options

    def _options_of(self, verb: str | None) -> list[str]:
        parsers = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and verb in action.choices:
                parsers = [action.choices[verb]]
        return [name for parser in parsers for name in parser._option_string_actions]

    def error(self, message: str) -> NoReturn:
        """Print a refusal; a wrong verb's lists no verbs if the right one is known."""
        if (match := _CHOICE.search(message)) and (hint := self._verb_hint(match["word"])):
            self._refuse(f"there is no verb {match['word']!r}", [hint])
        self._refuse(message, [])

    def _verb_hint(self, word: str) -> str:
        verbs = [
            verb
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for verb in action.choices
        ]
        meant = _BY_WORD.get(word.lower())
        if meant is None and (near := get_close_matches(word.lower(), verbs, n=1, cutoff=0.6)):
            return f"did you mean honectl {near[0]}?"
        return f"that is {meant} here" if meant else ""

    def _refuse(self, message: str, hints: Sequence[str]) -> NoReturn:
        if not hints:
            self.print_usage(sys.stderr)
        lines = [f"{self.prog}: error: {message}", *(f"hint: {hint}" for hint in hints)]
        printable = "".join(char if char.isprintable() or char == "\n" else "·" for char in "\n".join(lines))
        self.exit(2, f"{printable}\n")


def _option_hint(word: str, known: Sequence[str]) -> str:
    """Return the option that a wrong one means, if the verb has it."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return ""
    meant = _BY_OPTION.get(name)
    if meant is None or meant not in known:
        meant = next(iter(get_close_matches(name, known, n=1, cutoff=0.6)), None)
    return f"{name}: did you mean {meant}?" if meant else ""
