"""Every failure of a library has an error code of honed's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from honed.system.error import DatasetError
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
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "environment_invalid"),
        (RuntimeError("CUDA error: device-side assert triggered"), "model_invalid"),
        (IndexError("index out of range in self"), "model_invalid"),
        (RuntimeError("Error(s) in loading state_dict for Qwen3: size mismatch for lm_head.weight"), "model_invalid"),
        (
            ValueError("The checkpoint has model type `qwen9` but Transformers does not recognize this architecture"),
            "model_invalid",
        ),
        (OSError("We couldn't connect: HTTPSConnectionPool(host='huggingface.co')"), "environment_invalid"),
        (FileNotFoundError(2, "No such file or directory", "/srv/data/x.png"), "error"),
    ],
)
def test_an_exception_gets_its_code(problem: Exception, code: str) -> None:
    assert explain(problem).code == code
    assert explain(problem).message


def test_what_torch_says_of_a_device_is_for_everybody_and_what_it_says_of_tensors_is_not() -> None:
    assert explain(torch.OutOfMemoryError("CUDA out of memory")).evidence == ""
    error = explain(RuntimeError("index 7 is out of bounds"))
    assert (error.message, error.evidence) == ("RuntimeError: …", "RuntimeError: index 7 is out of bounds")


def test_what_nobody_foresaw_names_the_command_that_shows_its_traceback() -> None:
    error = explain(KeyError("x"), "17")
    assert "`honectl logs --raw 17`" in error.hint
    assert "`honectl logs --raw 17`" in explain(RuntimeError("device-side assert triggered"), "17").hint
    assert "embeddings" in explain(RuntimeError("device-side assert triggered"), "17").hint


def test_no_hint_sends_a_person_to_look_for_a_file_of_honeds() -> None:
    for path in (Path(__file__).resolve().parents[2] / "daemon/honed").rglob("*.py"):
        assert "see worker.log" not in path.read_text(), path
