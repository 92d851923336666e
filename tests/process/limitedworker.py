"""The real worker, in a process that may grow by so many bytes after its libraries are imported: `limitedworker.py
BYTES` before the worker's own arguments. The kernel limits the address space (RLIMIT_AS)."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm


def main() -> int:
    if "transformers" in sys.modules and not warm.has_usual_imports(sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv])  # a warm process hides what this job needs
    num_bytes = int(sys.argv.pop(1))
    from honed.worker.model import torchvision

    torchvision.mend()
    import torch
    from trl import SFTTrainer

    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # its threads and their stacks
    assert SFTTrainer
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))
    from honed.worker.__main__ import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
