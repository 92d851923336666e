"""What a person made is opened by untrusted.py alone: each other place that opens, lists or walks paths has a reason.

mypy sees to it that a `PersonPath` is given to nothing else; here stands why the paths of all others are no person's.
Whoever adds such a place gives it a reason here, or has untrusted.py open a `PersonPath`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import honed

PACKAGE = Path(honed.__file__).parent
#: The packages whose programs may have more permissions than a job's submitter; the worker's has none.
PRIVILEGED = ("check", "cli", "daemon", "job", "page", "run", "send", "system")
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "open", "iterdir", "glob", "rglob"}
FUNCTIONS = {"open", "listdir", "scandir", "walk", "fwalk"}
#: Objects with a method of such a name that opens nothing of that name.
OTHERS = {"webbrowser", "untrusted"}

#: Reason → the functions that it is of, by module.
REASONS = {
    "honed's own: a directory where no person and no worker can write": {
        "daemon/placement.py": "Placement.report",
        "job/arrival.py": "_recover_place",
        "job/corrupt.py": "Corrupt.names",
        "job/editing.py": "Edits._is_made Edits.make",
        "job/ended_index.py": "_written",
        "job/fence.py": "require_current",
        "job/lock.py": "_note holder take",
        "job/row_cache.py": "RowCache._found RowCache._note _read",
        "job/spool.py": "Entries._paths Pruned._paths Spool.recover _content",
        "job/submitted.py": "_num_bytes",
        "job/sweeping.py": "Sweeps._drop _remove",
        "job/usage.py": "Usage.flush",
        "page/metrics.py": "_outbox",
        "page/session.py": "begin find",
        "page/source.py": "_stamped",
        "run/fetcher.py": "Fetcher.recover ProcessFetchRunner.stop _read is_locked",
        "run/jobview.py": "_locked _open_loopback _remove _write",
        "run/rehearsed.py": "_prune read write",
        "run/slurm.py": "_instance",
        "send/notice_sender.py": "Messenger._read Messenger.reload",
        "send/notification.py": "Notices._put Notices._tell_end Notices.tend waiting",
        "send/outbox.py": "Outbox._append Outbox._begin _lines segments",
        "send/refused_rows.py": "RefusedRows.has_any RefusedRows.send_again RefusedRows.set_aside",
        "send/sender.py": "Sender._alone",
        "send/wandb_runs.py": "Collector._room_of is_marked waiting",
        "send/wandb_sync.py": "Syncer._sync",
        "system/durable.py": "_create_beside below read remove_flat sync_dir sync_file",
        "system/secret.py": "read",
        "system/training.py": "enter",
    },
    "the names of a directory of honed's own; what bears them is not opened": {
        "daemon/housekeeper.py": "Pruning.find_leftovers",
        "job/arrival.py": "Arrivals.listed Arrivals.listing Numbers._max_id",
        "job/counters.py": "Counters._refused",
        "job/query.py": "refusal",
        "job/removal.py": "remove_checkpoints",
        "job/spool.py": "names_in",
        "send/wandb_runs.py": "Collector.tend",
    },
    "the system's: /proc, /sys, devices, sockets, installed packages and units": {
        "job/lock.py": "_by_kernel",
        "job/query.py": "_worker",
        "page/page.py": "vendored",
        "run/process.py": "ProcessRunner.live _session _words",
        "run/slurm_helper.py": "Helper._options _other_owner",
        "system/client.py": "address_of",
        "system/clock.py": "boot_id",
        "system/device.py": "_cpu_name system_memory",
        "system/door.py": "Door._keep_spare",
        "system/environment.py": "running_from say",
        "system/holder.py": "Holders._read",
        "system/installed.py": "_module_names _sources base_prefix known_model_types unshifted_model_types",
        "system/journal.py": "Journal._send_sealed",
        "system/loopback.py": "user_of",
        "system/niceness.py": "step_back",
        "system/usage.py": "_left_below available_bytes usage",
    },
    "the model cache, which only honed and the administrator fill": {
        "run/snapshot.py": "commit_of is_foreign read",
    },
    "files that the caller of the command names or made, with the caller's own rights": {
        "cli/again.py": "rerun",
        "run/slurm_doctor.py": "_fault _held",
        "cli/convert.py": "write_new",
        "cli/doctor.py": "_limits _no_gpu _notices _polkit _reporting _user_database",
        "cli/editing.py": "_from_file _in_editor _is_kept _make",
        "cli/foreign.py": "_dataset_of _script _settings _trl",
        "cli/init.py": "_checked",
        "cli/job_numbers.py": "_entries",
        "cli/joblog.py": "_has_journal",
        "cli/launch.py": "is_script read",
        "cli/sandbox.py": "open_up",
        "cli/setup.py": "_alone _digest _environments _forget_unfinished is_free remove_old",
        "cli/stage.py": "_tree stage",
        "cli/submission.py": "_send try_out",
        "job/arrival.py": "drop",
    },
    "runs as the job's submitter, under a deadline": {
        "check/placecheck.py": "_check_output_dir",
        "check/policy.py": "_entries",
        "check/preflight.py": "main",
        "check/rehearsal.py": "_seen",
        "check/templatecheck.py": "_read",
        "run/viewmount.py": "_open",
    },
    "runs as the job's worker, in its own unit": {
        "job/event.py": "EventWriter.__init__ has_begun",
        "run/jobunit.py": "end start",
        "run/shim.py": (
            "Nodes.orders Relay.__init__ Watch._note_pause append boot_id end_of_nodes has_ended main "
            "make_shared out_of_memory_kills write_exit write_once"
        ),
    },
    "the openers and deleters themselves, which follow no link": {
        "job/event.py": "read",
        "job/tree.py": "_is_mounted _Walk._enter _Walk._is_mount _Walk._leave _Walk._open _walk mounts_below",
        "system/layout.py": "JobLayout.spec_path",
        "system/untrusted.py": "_create_beside _look_up _looked_up_all _opened names_in open_plain",
    },
}


def _calls(path: Path) -> Iterator[str]:
    """Yield the functions of a module that open, list or walk paths."""

    def visit(node: ast.AST, place: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = (*place, node.name)
        if isinstance(node, ast.Call) and _opens(node):
            yield ".".join(place)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, place)

    yield from visit(ast.parse(path.read_text()), ())


def _opens(call: ast.Call) -> bool:
    match call:
        case ast.Call(ast.Name("open")):
            return True
        case ast.Call(ast.Name("Path"), [ast.Call(ast.Name("str"))]):
            return True  # a PersonPath could be made a Path so
        case ast.Call(ast.Attribute(ast.Name("os"), name)):
            return name in FUNCTIONS
        case ast.Call(ast.Attribute(ast.Name(owner), name)) if owner in OTHERS:
            return False
        case ast.Call(ast.Attribute(_, name)):
            return name in METHODS
        case _:
            return False


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PRIVILEGED:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), path


def test_each_place_that_opens_a_path_has_its_reason() -> None:
    found = {f"{module}: {function}" for module, path in _modules() for function in _calls(path)}
    known = {
        f"{module}: {function}"
        for modules in REASONS.values()
        for module, functions in modules.items()
        for function in functions.split()
    }
    assert sorted(found - known) == [], "use untrusted.py and a PersonPath, or give the reason here"
    assert sorted(known - found) == [], "no longer there"


def test_programs_with_more_permissions_have_no_plain_paths_of_a_job() -> None:
    """`Layout.job` and `JobLayout` are the worker's."""
    found = []
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name(owner) | ast.Attribute(_, owner), "job")) if "layout" in owner:
                    found.append(f"{module}:{node.lineno}")
                case ast.Call(ast.Name("JobLayout" | "AttemptLayout")) if module != "system/layout.py":
                    found.append(f"{module}:{node.lineno}")
    assert found == []
