"""What a user sees who opens outputs: `python opened.py` reads JSON, [[directory, base or null, ids, image]…], and
prints for each the logits, the token ids of a text, the end tokens, and the answer to a prompt.

It runs under the transformers that is found, the one of honed's workers or an older one, and uses nothing of honed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

TEXT = "What is  the capital of\n\tFrance? Paris, 1234!"


def look(directory: str, base: str | None, question: str | None) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = AutoConfig.from_pretrained(base or directory)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model, info = kind.from_pretrained(base or directory, dtype=torch.float32, output_loading_info=True)
    lost = [*info["missing_keys"], *info["mismatched_keys"], *(info.get("unexpected_keys") or ())]
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory)
    else:
        lost += [] if model.generation_config.eos_token_id else ["eos_token_id"]
    ids = torch.arange(20, 60)[None]
    model.eval()
    answer = ""
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        if question is not None:
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            made = model.generate(**asked, do_sample=False, max_new_tokens=40)
            answer = tokenizer.decode(made[0, asked["input_ids"].shape[1] :])
    return {
        "transformers": transformers.__version__,
        "logits": logits[:, ::7].double().tolist(),
        "ids": tokenizer(TEXT)["input_ids"],
        "eos": tokenizer.eos_token,
        "lost": [str(each) for each in lost],
        "answer": answer,
    }


if __name__ == "__main__":
    json.dump([look(*each) for each in json.load(sys.stdin)], sys.stdout)
