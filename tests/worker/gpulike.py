"""`python -m worker.gpulike [NAME=VALUE] JOB_DIR …`: a worker on a CPU, with the SFTConfig and SFTTrainer that Unsloth
puts in place of TRL's on a GPU. It runs job after job, with the given variables in its environment.

UNSLOTH_ALLOW_CPU enables Unsloth's GPU code without a GPU, for Unsloth's own tests. It then leaves TRL unpatched, so
this module requests the patches it makes on a GPU. Its kernels need a GPU: models are loaded by its code for CPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    os.environ |= {
        "UNSLOTH_ALLOW_CPU": "1",
        "UNSLOTH_CPU_BF16": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "UNSLOTH_COMPILE_DISABLE": "1",
    }
    import trl
    import unsloth
    from unsloth.models.rl import _patch_trl_rl_trainers
    from unsloth.trainer import _patch_sft_trainer_auto_packing
    from unsloth_zoo.cpu import FastCPUModel

    _patch_trl_rl_trainers("sft_trainer")
    _patch_sft_trainer_auto_packing(trl)
    assert "UnslothSFTTrainer" in [each.__name__ for each in trl.SFTTrainer.__mro__]
    unsloth.FastLanguageModel = FastCPUModel
    from honed.worker.run import run

    for argument in sys.argv[1:]:
        name, is_set, value = argument.partition("=")
        if is_set:
            os.environ[name] = value
        else:
            run(Path(argument), 1)


if __name__ == "__main__":
    main()
