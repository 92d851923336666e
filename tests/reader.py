"""A process that opens models as a user would, with transformers and PEFT alone: `python reader.py`, a request a line.

    {"model": DIR, "adapter": DIR or "", "merged": false, "sees": false, "dtype": "float32", "attention": "sdpa",
     "ids": [[…]], "logits": FILE}
      ──►  {"missing": […], "unexpected": […], "error": ""}

Each model is opened in a fork, and the logits of the ids are written to the file. Nothing of honed's is imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def open_model(asked: dict[str, Any]) -> dict[str, Any]:
    """Open a model, or an adapter on its base, and write its logits. Returns the names that the loader reports."""
    import torch
    import transformers

    kind = transformers.AutoModelForImageTextToText if asked["sees"] else transformers.AutoModelForCausalLM
    model, told = kind.from_pretrained(
        asked["model"], dtype=asked["dtype"], attn_implementation=asked["attention"], output_loading_info=True
    )
    if asked["adapter"]:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, asked["adapter"])
    if asked["merged"]:
        model = model.merge_and_unload()
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(asked["ids"]), use_cache=False).logits
    torch.save(logits, asked["logits"])
    return {name: sorted(map(str, told[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}


def main() -> None:
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # no model needs it, and it may be of another torch
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        read_fd, write_fd = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                assert "honed" not in sys.modules
                found = {"error": ""} | open_model(json.loads(line))
            except Exception as error:  # noqa: BLE001 - the one who asked tells of it
                found = {"error": f"{type(error).__name__}: {error}"}
            os.write(write_fd, json.dumps(found).encode())
            os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        answers.write((text or '{"error": "the process died"}') + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
