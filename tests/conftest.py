"""What this machine lacks is skipped with the reason; what takes long runs with --all; the slow folders begin."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
#: The slow folders first: what is left at the end is short, so that no test process is long alone.
ORDER = ("system", "crash", "process", "worker", "unit")
for name in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "HONED_ROOT"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the whole of the sampled matrices")


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
        (left_out if is_left_out else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=lambda item: ORDER.index(item.path.parent.name))
