"""What this machine lacks is skipped with the reason; what takes long runs with --all; the slow folders begin."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import costs
import warm

# The speed of the machine is no property of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TESTS = Path(__file__).parent
#: Folders whose tests mostly wait for other processes, and folders whose tests compute, each with the seconds that a
#: file of it takes. Both kinds are begun side by side, so that at each time there is as much to compute as there are
#: processors; the slow folders first, so that what is left at the end is short.
WAITING = {"system": 40, "cluster": 60, "crash": 30, "process": 15}
COMPUTING = {"worker": 9, "unit": 2}
#: Files that take a minute or so by themselves, mostly waiting, and whose names would make them the last ones, waited
#: for with processors idle. They begin before the others of their folder.
LONG = {
    f"test_{name}.py"
    for name in ("submit", "tracker", "waiting", "web", "web_flood", "web_pages", "web_session", "worker_fates")
}
# Programs of the tests find each other beside themselves, though a test may call a program's main.
for name in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "HONED_ROOT", "PYTHONSAFEPATH"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the whole of the sampled matrices")
    parser.addoption("--quick", action="store_true", help="run what takes two minutes")
    parser.addoption("--costs", metavar="FILE", help="write each test's CPU time, and tell of the dearest")
    parser.addoption("--races", type=int, default=35, help="races of each kind for another user's files")
    parser.addoption("--errnos", type=int, default=240, help="file operations that fail")
    parser.addoption("--seed", type=int, default=1, help="of what fails")
    parser.addoption("--preemptions", type=int, default=3, help="preemptions of one training job")


def pytest_configure(config: pytest.Config) -> None:
    warm.directory()  # before there are test processes, which share what is in it
    specs = getattr(config.option, "tx", None)
    if specs and not any(name.startswith("COVERAGE_PROCESS") for name in os.environ):
        warm.address("tests")
        program = shlex.join([sys.executable, str(TESTS / "forked.py")])
        config.option.tx = [f"popen//python={program}" if spec == "popen" else spec for spec in specs]
    costs.register(config)


def has_gpu() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    return b"GPU" in subprocess.run([nvidia_smi, "-L"], capture_output=True, check=False).stdout


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacks_gpu = not has_gpu()
    chosen, left_out = [], []
    for item in items:
        if item.get_closest_marker("gpu") and lacks_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        is_left_out = item.get_closest_marker("exhaustive") and not config.getoption("--all")
        if config.getoption("--quick"):
            is_unit = item.path.is_relative_to(TESTS / "unit")
            is_left_out = item.get_closest_marker("slow") if is_unit else not item.get_closest_marker("quick")
        (left_out if is_left_out else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    places = places_of(dict.fromkeys(item.path for item in chosen))
    items[:] = sorted(chosen, key=lambda item: places[item.path])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Nothing that is there now will be garbage: collections of it need not go through all libraries and tests."""
    gc.freeze()


def places_of(paths: Collection[Path]) -> dict[Path, float]:
    """Return the places of test files in the order of all, between 0 and 1."""
    found: dict[Path, float] = {}
    for folders in (WAITING, COMPUTING):
        names = {path: path.relative_to(TESTS).parts[0] for path in paths}
        ours = [path for path in names if names[path] in folders]
        ours.sort(key=lambda path: ([*folders].index(names[path]), path.name not in LONG))
        ends = [*itertools.accumulate(folders[names[path]] for path in ours)]
        found |= {path: end / ends[-1] for path, end in zip(ours, [0, *ends], strict=False)}
    return found


@pytest.fixture(autouse=True)
def priority_as_it_was() -> Iterator[None]:
    """A program's main that steps back for training, called by a test, would slow down all tests after it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        with contextlib.suppress(PermissionError):  # only root may step forward again
            os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Fails a test that leaves torch computing otherwise than it found it: what trains next in this process would be
    another run. `full_determinism` is a job's own, set for its process, and is taken back here."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_autocast_enabled"):
        return
    dtype, is_autocast, is_grad = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    matmul = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    assert (str(dtype), is_autocast, is_grad, matmul) == ("torch.float32", False, True, "highest")
