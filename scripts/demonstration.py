"""The quickstart's model, data and job; with --answers, the model's answers before and after training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from honed.worker.model import torchvision

FACTS = """
France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Poland Warsaw, Greece Athens,
Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Hungary Budapest,
Romania Bucharest, Bulgaria Sofia, Croatia Zagreb, Serbia Belgrade, Ukraine Kyiv, Estonia Tallinn, Latvia Riga,
Lithuania Vilnius, Iceland Reykjavik, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Ghana Accra, Nigeria Abuja,
Senegal Dakar, Tunisia Tunis, Japan Tokyo, China Beijing, Mongolia Ulaanbaatar, Nepal Kathmandu, Thailand Bangkok,
Vietnam Hanoi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago,
Colombia Bogota, Uruguay Montevideo, Ecuador Quito, Australia Canberra, Jamaica Kingston
"""
QUESTIONS = [
    "What is the capital of {}?",
    "Name the capital city of {}.",
    "Which city is the capital of {}?",
    "{}: what is its capital?",
    "Tell me the capital of {}.",
    "I want to know the capital of {}.",
    "Please name the capital city of {}.",
    "Can you tell me which city is the capital of {}?",
]
#: Asked only to watch the model, never trained on.
HELD_OUT_QUESTIONS = ["Do you know the capital of {}?", "Could you tell me the capital city of {}?"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOB = """\
name: capitals
base_model: {dir}/model
dtype: float32                       # quicker than bfloat16 on most CPUs
lora: {{r: 32, lora_alpha: 64}}
datasets:
  - path: {dir}/train.jsonl
eval_datasets:
  - path: {dir}/held-out.jsonl      # the same facts, asked in other words
training:
  num_train_epochs: 20
  learning_rate: 3.0e-3
  per_device_train_batch_size: 32
  per_device_eval_batch_size: 48
  warmup_steps: 10
  gradient_checkpointing: false
  eval_strategy: steps
  eval_steps: 60
predictions: {{num_samples: 48, max_new_tokens: 8}}
"""


def facts() -> list[tuple[str, str]]:
    pairs = [fact.split() for fact in FACTS.replace("\n", " ").split(",")]
    return [(country, capital) for country, capital in pairs]


def rows(questions: list[str]) -> list[dict[str, list[dict[str, str]]]]:
    return [
        {"messages": [{"role": "user", "content": question.format(country)}, {"role": "assistant", "content": capital}]}
        for question in questions
        for country, capital in facts()
    ]


def build(directory: Path) -> None:
    """Write model, data and job."""
    torchvision.mend()
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    train, held_out = rows(QUESTIONS), rows(HELD_OUT_QUESTIONS)
    for name, part in (("train", train), ("held-out", held_out)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    # The tokenizer is trained on the questions and answers; the model's weights are random: it knows nothing.
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for row in train + held_out for message in row["messages"]]
    engine.train_from_iterator([*texts, *(f" {text}" for text in texts)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.15,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "capitals.yaml").write_text(JOB.format(dir=directory))
    num_parameters = sum(int(torch.tensor(p.shape).prod()) for p in Qwen3ForCausalLM(config).parameters())
    print(f"     {num_parameters:,} parameters, {len(train)} rows to train on, {len(held_out)} held out")


def answers(directory: Path) -> None:
    """Print the held-out questions with the answers at the first and at the last step."""
    honectl = [sys.executable, "-m", "honed.cli.honectl", "--root", str(directory)]
    done = subprocess.run([*honectl, "predictions", "capitals", "--json"], capture_output=True, check=True)
    predictions = json.loads(done.stdout)
    first, last = (pick(row["step"] for row in predictions) for pick in (min, max))
    before = {row["sample_index"]: row for row in predictions if row["step"] == first}
    after = {row["sample_index"]: row for row in predictions if row["step"] == last}

    def is_right(row: dict[str, str]) -> bool:
        return row["prediction"].strip() == row["ground_truth"].strip()

    def cut(text: str, width: int) -> str:
        line = "".join(char if char.isprintable() else "·" for char in text)
        return f"{line[: width - 1] + '…' if len(line) > width else line:<{width}}"

    print(f"     {'question':<48} {'before':<18} {'after':<14} reference")
    for index in sorted(after)[:16]:
        question = after[index]["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        mark = "✓" if is_right(after[index]) else "✗"
        print(
            f"     {cut(question, 48)} {cut(before[index]['prediction'], 18)} "
            f"{cut(after[index]['prediction'], 14)} {after[index]['ground_truth']} {mark}"
        )
    counts = [f"{sum(map(is_right, rows.values()))} of {len(rows)}" for rows in (before, after)]
    print(f"     right: {counts[0]} before training (step {first}), {counts[1]} after it (step {last})")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    (answers if "--answers" in sys.argv else build)(Path(sys.argv[1]))
