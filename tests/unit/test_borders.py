"""The border between the daemon's side and the worker's, seen in the modules that a process has loaded, and the imports
between modules."""

from __future__ import annotations

import ast
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import honed
from honed.cli import command_line
from honed.system import device
from honed.system.control import Request, Server
from honed.system.layout import Layout


def modules_of(code: str) -> set[str]:
    """Return the modules that are loaded after this code has run in a process of its own."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_daemon_and_honectl_load_no_training_library() -> None:
    loaded = modules_of(
        "import honed.daemon.loop, honed.cli.doctor, honed.check.preflight\nfrom honed.cli import command_line\n"
        f"for place in {sorted(places())!r}: command_line.find(place)"
    )
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "transformers", "trl", "numpy"})


def test_a_worker_begins_without_the_libraries_of_which_it_hides_parts() -> None:
    loaded = modules_of("import honed.worker.__main__, honed.worker.run")
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "transformers", "trl", "peft"})


def test_the_daemon_and_honectl_load_no_web_server_and_no_templates() -> None:
    web = {"jinja2", "markupsafe", "starlette", "fastapi", "uvicorn", "prometheus_client"}
    assert modules_of("import honed.daemon.loop, honed.send.sender").isdisjoint(web)
    assert modules_of(
        f"from honed.cli import command_line\nfor place in {sorted(places())!r}: command_line.find(place)"
    ).isdisjoint(web | {"shtab", "jsonschema"})  # the tests' own packages, which an installation lacks


def test_every_verb_of_honectl_is_where_its_line_says() -> None:
    assert all(callable(command_line.find(place)) for place in places())


def places() -> set[str]:
    return {verb.get_default("run") for _, _, verb in command_line.verbs(command_line.parser())}


def test_the_daemon_knows_no_model_and_no_data() -> None:
    """The daemon stays small and starts quickly: the code that judges a job is in the helper."""
    loaded = modules_of("import honed.daemon.loop")
    assert {
        name for name in loaded if name.startswith(("honed.inputs", "honed.text", "honed.plan", "honed.check"))
    } == set()
    assert loaded.isdisjoint({"honed.spec.spec", "honed.spec.training"})


def imports() -> dict[str, set[str]]:
    """Return the modules of honed that each of them imports, wherever it does so, for types alone, too."""
    root = Path(honed.__file__).parent
    paths = {
        ".".join(("honed", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, path
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= names & paths.keys() or {node.module}
        graph[module] = imported & paths.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        path.append(node)
        for other in graph[node]:
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == numbers[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            found.extend([sorted(component)] * (len(component) > 1))

    for node in graph:
        if node not in numbers:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"f"}, "f": {"d"}}
    assert circles(graph) == [["d", "e", "f"], ["b", "c"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports()) == []


#: Modules that name Slurm outside its own: its section, its key in `show`, its words, and the choice of the runner.
KNOW_SLURM = {
    *("cli/launch.py", "cli/listing.py", "cli/nearest.py", "job/shape.py", "page/api.py"),
    *("run/choice.py", "spec/config.py", "spec/spec.py"),
}


def test_slurm_is_known_to_its_runner_and_few_others() -> None:
    root = Path(honed.__file__).parent
    naming = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search("slurm|sbatch", path.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    own = {name for name in naming if name.startswith("run/slurm")} | {"check/clustercheck.py"}
    assert naming - own <= KNOW_SLURM


#: Packages of others that the idle daemon imports, and modules of Python that it does not.
DAEMON = {
    *("annotated_types", "jeepney", "pydantic", "pydantic_core", "sdnotify", "typing_extensions", "typing_inspection"),
    "watchdog",
}
NOT_OF_THE_DAEMON = {
    *("asyncio", "csv", "difflib", "email", "html", "http", "importlib.metadata", "multiprocessing", "smtplib", "ssl"),
    *("unittest", "urllib.request", "xml", "zipfile"),
}


def test_the_idle_daemon_stays_small(tmp_path: Path) -> None:
    """Each of these modules takes the memory of an idle daemon, day and night."""
    loaded = modules_of(
        f"from honed.daemon import loop\nassert loop.main(['--root', {str(tmp_path)!r}, '--drain']) == 0"
    ) - modules_of("")
    if sys.platform == "linux" and not device.cuda_devices():
        assert "pynvml" not in loaded
    names = {name.partition(".")[0] for name in loaded if not name.startswith("_")}
    assert names - sys.stdlib_module_names - {"honed", "pynvml"} <= DAEMON
    assert loaded.isdisjoint(NOT_OF_THE_DAEMON)


#: The modules of honed that a command of honectl imports, and the heavier ones of Python and of others.
VERSION = {"honed", "honed.cli", "honed.cli.honectl"}
COMPLETION = VERSION | {
    *("honed.cli.job_numbers", "honed.system", "honed.system.client", "honed.system.error", "honed.system.layout"),
    *("honed.system.part", "honed.system.personpath", "honed.system.printable", "honed.system.quote"),
}
LIST = COMPLETION - {"honed.cli.job_numbers"} | {
    *(
        "honed.cli.column",
        "honed.cli.command_line",
        "honed.cli.instance",
        "honed.cli.listing",
        "honed.cli.nearest",
        "honed.cli.terminal",
    ),
    *("honed.job", "honed.job.change", "honed.job.job", "honed.job.progress", "honed.spec", "honed.spec.kind"),
    *("honed.system.argument", "honed.system.clock"),
    *("argparse", "dataclasses", "decimal", "inspect", "pygments", "rich", "shutil"),
}
HEAVY = {
    *("argparse", "asyncio", "concurrent", "ctypes", "dataclasses", "decimal", "email", "http", "importlib.metadata"),
    *("inspect", "logging", "multiprocessing", "shutil", "sqlite3", "ssl", "subprocess", "tempfile", "tomllib", "xml"),
}


def modules_of_honectl(root: Path, *words: str) -> set[str]:
    """Return what a command of honectl imports: modules of honed, heavy ones, and packages of others."""
    run = f"from honed.cli import honectl\nassert honectl.main({list(words)!r}) == 0"
    loaded = modules_of(f"import os\nos.environ['HONED_ROOT'] = {str(root)!r}\n{run}") - modules_of("")
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"honed", "__mp_main__"}
    return {name for name in loaded if name.startswith("honed")} | loaded & HEAVY | packages


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Provide the root of an instance whose daemon answers, with no jobs."""
    refused = {"files": [], "num": 0, "are_all": True}
    overview = {"jobs": [], "counts": {}, "refused": refused}
    answers = {"numbers": [], "names": [], "overview": overview, "status": {"arrivals": []}}
    layout = Layout(tmp_path)
    layout.runtime_dir.mkdir(parents=True)
    with selectors.DefaultSelector() as selector:
        asked: list[Request] = []
        server = Server(layout.control_path, selector, lambda request: asked.append(request) or answers[request.verb])
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                for key, events in selector.select(0.02):
                    key.data(events)

        thread = threading.Thread(target=serve)
        thread.start()
        yield tmp_path
        is_over.set()
        thread.join()
        server.close()
        assert len(asked) <= 2


def test_the_version_of_honectl_loads_no_other_module(root: Path) -> None:
    assert modules_of_honectl(root, "--version") <= VERSION


def test_a_tab_of_honectl_loads_little(root: Path) -> None:
    assert modules_of_honectl(root, "--job-numbers") <= COMPLETION


def test_the_list_of_honectl_loads_no_job_files_and_no_database(root: Path) -> None:
    assert modules_of_honectl(root, "list") <= LIST
