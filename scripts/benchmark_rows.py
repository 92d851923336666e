"""Benchmark of the data stage: duration and memory, beside `SFTTrainer._prepare_dataset` of TRL on the same rows."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import plan_document

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
VOCAB_SIZE = 8000
#: With the tags that TRL needs for a mask of the assistant's turns; honed needs none.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Seconds between looks at the memory.
LOOK_SEC = 0.2
#: Rows up to which the trained tokens are counted on both sides.
MAX_COUNTED = 10_000


def words() -> list[str]:
    docs = Path(__file__).parents[1] / "docs"
    return [word for page in sorted(docs.glob("*.md")) for word in page.read_text().split()]


def write(path: Path, kind: str, number: int) -> None:
    """Write rows of about 1 kB."""
    rng, listed = random.Random(7), words()

    def said(num_words: int) -> str:
        start = rng.randrange(len(listed) - num_words)
        return " ".join(listed[start : start + num_words])

    with path.open("w") as file:
        for n in range(number):
            asked, answer = f"{n}: {said(55)}", said(85)
            if kind == "messages":
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": turns}) + "\n")
            else:
                file.write(json.dumps({"prompt": asked, "completion": f" {answer}"}) + "\n")


def build_model(directory: Path) -> None:
    """Write a tiny model, with a tokenizer that was trained on honed's documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator([" ".join(words())], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _times() -> tuple[float, float]:
    """Return the clock, and the CPU seconds of this process and of those that it waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in both)


def _ready() -> tuple[float, float]:
    print("ready", flush=True)
    sys.stdin.readline()
    return _times()


def _done(started: tuple[float, float]) -> None:
    took = [now - then for now, then in zip(_times(), started, strict=True)]
    print(f"done {took[0]:.3f} {took[1]:.3f}", flush=True)
    sys.stdin.readline()


def honed_side(directory: Path, path: Path, num_processes: int) -> None:
    """Run the data stage of a job, as its worker does."""
    from honed.worker.model import torchvision

    torchvision.mend()
    from transformers import AutoTokenizer
    from trl import SFTTrainer  # noqa: F401 - a worker has it

    from honed.inputs import basemodel
    from honed.plan import plan
    from honed.spec import jobfile
    from honed.spec.config import Config
    from honed.system import installed
    from honed.system.device import cpu
    from honed.text.chat import ChatFormat
    from honed.worker import assignment
    from honed.worker.rows import data, encoder
    from honed.worker.stop import Stop

    job_dir = Path(tempfile.mkdtemp(dir=directory))
    (job_dir / "attempts/1").mkdir(parents=True)
    document = {"base_model": str(directory / "model"), "datasets": [{"path": str(path)}], "lora": {}}
    spec = jobfile.validate(document | {"training": {"max_steps": 1, "max_length": 1024}})
    planned = plan.make(
        spec, basemodel.inspect(directory / "model"), cpu(), config=Config(), installed=installed.look()
    )
    plan_document.write(job_dir, spec, planned)
    job = assignment.read(job_dir, 1)
    chat = ChatFormat.of(spec, AutoTokenizer.from_pretrained(directory / "model"))
    encoder.processes = lambda **_: num_processes
    started = _ready()
    found = data.build(job, chat, Stop())
    print(f"{len(found.train.examples)} rows, {found.train.num_trained_tokens} trained tokens", file=sys.stderr)
    _done(started)


def trl_side(directory: Path, path: Path, num_processes: int) -> None:
    """Run TRL's preparation, with its mask of the assistant's turns or of completions."""
    from honed.worker.model import torchvision

    torchvision.mend()
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    trainer: Any = object.__new__(SFTTrainer)
    trainer._tokenizer, trainer.chat_template, trainer.completion_only_loss = tokenizer, None, True
    is_chat = "messages" in path.name
    args = SFTConfig(
        output_dir=str(directory / "trl"),
        dataset_num_proc=num_processes if num_processes > 1 else None,
        assistant_only_loss=is_chat,
        max_length=1024,
        use_cpu=True,
        bf16=False,
    )
    datasets.disable_progress_bars()
    cache = tempfile.mkdtemp(dir=directory)
    _ready()
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
    loaded = _times()
    made = trainer._prepare_dataset(rows, tokenizer, args, False, None, "train")
    took = _times()
    trained = sum(label != -100 for row in made for label in row["labels"][1:]) if len(made) <= MAX_COUNTED else "?"
    print(f"{len(made)} rows, {trained} trained tokens", file=sys.stderr)
    _done(tuple(loaded[n] + now - took[n] for n, now in enumerate(_times())))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def pss_anon(pid: int) -> int:
    """Return the anonymous memory of a process and its descendants, in bytes."""
    total = 0
    for each in _tree(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))
    return total


def measure(side: str, directory: Path, path: Path, num_processes: int) -> tuple[float, float, int]:
    """Return the stage's seconds, its CPU seconds, and the most anonymous memory that it adds to the process."""
    command = [sys.executable, __file__, "--side", side, str(directory), str(path), str(num_processes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdin is not None and process.stdout is not None
    while (line := process.stdout.readline()) and line != "ready\n":
        pass
    before = most = pss_anon(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    while not select.select([process.stdout], [], [], LOOK_SEC)[0]:
        most = max(most, pss_anon(process.pid))
    said = process.stdout.readline()
    process.communicate("\n")
    if "done" not in said:
        raise SystemExit(f"{side} failed")
    clock, cpu = map(float, said.split()[1:])
    return clock, cpu, most - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", default="messages,prompt_completion")
    parser.add_argument("--sides", default="honed,trl")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, directory, path, number = options.side
        {"honed": honed_side, "trl": trl_side}[side](Path(directory), Path(path), int(number))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as made:
        directory = Path(made)
        subprocess.run(
            [sys.executable, "-c", f"import benchmark_rows as b, pathlib; b.build_model(pathlib.Path('{made}/model'))"],
            cwd=Path(__file__).parent,
            check=True,
        )
        for kind in options.kinds.split(","):
            path = directory / f"{kind}.jsonl"
            if not (options.dir and (given := options.dir / f"{kind}-{options.rows}.jsonl").exists()):
                write(path, kind, options.rows)
            else:
                path.symlink_to(given)
            found: dict[str, list[tuple[float, float, int]]] = {}
            for _ in range(options.runs):
                for side in options.sides.split(","):
                    found.setdefault(side, []).append(measure(side, directory, path, options.processes))
            for side, runs in found.items():
                clock, cpu = (statistics.median(column) for column in list(zip(*runs, strict=True))[:2])
                print(
                    f"| {kind} | {options.rows:,} | {options.processes} | {side} | {clock:.1f} | {cpu:.1f} | "
                    f"{1e6 * cpu / options.rows:.0f} | {max(run[2] for run in runs) / 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
