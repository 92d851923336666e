"""The worker, with a torch whose GPU exists and may not be used: `python gatedworker.py JOB_DIR ATTEMPT …`.

NVML says that there is one GPU; every way of torch to initialise CUDA is written to `touched` in the working directory.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "")  # the worker itself has to set it
from honed.worker.model import torchvision

torchvision.mend()
import torch  # noqa: E402

TOUCHED = Path.cwd() / "touched"


def touch(*_arguments: object) -> NoReturn:
    with TOUCHED.open("a") as file:
        traceback.print_stack(file=file)
    raise RuntimeError("CUDA was initialised before the gate")


def num_by_nvml() -> int:
    return 1 if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1" else touch()


torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = num_by_nvml
for name in ("init", "getDeviceCount", "getDevice", "setDevice", "getDeviceProperties", "getCurrentRawStream"):
    setattr(torch._C, f"_cuda_{name}", touch)
torch.cuda._lazy_init = touch

if __name__ == "__main__":
    from honed.worker.__main__ import main

    sys.exit(main())
