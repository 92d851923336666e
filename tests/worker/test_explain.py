"""Every way in which a library gives up has a name of honed's."""

from __future__ import annotations

import errno

import pytest
import torch

from honed.error import DatasetError
from honed.worker.run import explain


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out_of_memory"),
        (ImportError("No module named 'flash_attn'"), "environment_invalid"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/out"), "environment_invalid"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_insufficient"),
        (DatasetError("no rows"), "dataset_invalid"),
        (KeyError("x"), "error"),
    ],
)
def test_an_exception_gets_its_code(problem: Exception, code: str) -> None:
    assert explain(problem).code == code
    assert explain(problem).message
