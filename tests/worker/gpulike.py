"""`python -m worker.gpulike`: workers on a CPU, with the SFTConfig and SFTTrainer that Unsloth puts in place of TRL's
on a GPU. Each line of its standard input is a list in JSON: directories of jobs, scripts that end in .py, and variables
for what follows, NAME=VALUE. It is done in a fork of the process that has imported, and answered by its status.

UNSLOTH_ALLOW_CPU enables Unsloth's GPU code without a GPU, for Unsloth's own tests. It then leaves TRL unpatched, so
this module requests the patches it makes on a GPU. Its kernels need a GPU: models are loaded by its code for CPUs.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import TextIO


def main(answers: TextIO) -> None:
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
    import honed.worker.run  # noqa: F401

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                work(json.loads(line))
                status = 0
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


def work(arguments: list[str]) -> None:
    from honed.worker.run import run

    for argument in arguments:
        name, is_set, value = argument.partition("=")
        if is_set:
            os.environ[name] = value
        elif argument.endswith(".py"):
            runpy.run_path(argument)
        else:
            run(Path(argument), 1)


if __name__ == "__main__":
    descriptor = os.dup(1)
    os.dup2(2, 1)  # libraries print
    main(os.fdopen(descriptor, "w"))
