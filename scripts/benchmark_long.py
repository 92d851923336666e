"""Benchmark of a long run: 300 steps of honed's worker beside those of a bare SFTTrainer, in turn.

    scripts/bench long [--pairs 5] [--steps 300] [--every 50] [--hidden 192] [--layers 3]
    scripts/bench long --apart --embeddings 131072 --hidden 1024 --batch 1 --steps 60 --every 20    large checkpoints

Both log each step, save a checkpoint, evaluate and generate the same answers every 50 steps; each is a process with one
thread for its computations. The two of a pair make their steps in turn, so that both meet the same load of the machine;
with --apart one runs after the other. Durations of steps go from the beginning of one to the beginning of the next, so
they include logging; steps followed by an evaluation or a checkpoint are not among them. The whole goes from the first
step to the end of training, when the last checkpoint is whole: honed's is then durable, the bare trainer's is not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.system.personpath import PersonPath

NUM_ROWS, NUM_HELD_OUT, NUM_SAMPLES, MAX_NEW_TOKENS = 2048, 64, 16, 32
SEED = 42
#: In the environment of a run that makes its steps in turn with another: the descriptors of its turn and the other's,
#: and that it has the first turn: it waits for the other to be ready.
TURNS_VARIABLE, FIRST_VARIABLE = "HONED_BENCHMARK_TURNS", "HONED_BENCHMARK_FIRST"
#: A difference between the losses of the two that is more than rounding.
TOLERANCE = 1e-6


# --- one run, in a process of its own ---------------------------------------------------------------------------------


class Marks:
    """Times at which a trainer begins a step, and has evaluated, saved, and ended."""

    def __init__(self) -> None:
        self.times: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)

    def turn(self) -> None:
        """Give the turn to the other run of the pair, and wait until it is given back, or the other run has ended."""
        if TURNS_VARIABLE not in os.environ:
            return
        own, other = map(int, os.environ[TURNS_VARIABLE].split())
        if self.times["step_begin"] or os.environ.get(FIRST_VARIABLE) is None:
            with contextlib.suppress(BrokenPipeError):
                os.write(other, b".")
        os.read(own, 1)

    def take(self, name: str, step: int) -> None:
        """Take the time and the CPU time of the process, all threads."""
        self.times[name][step] = time.time(), time.process_time()

    def watch(self, module: Any) -> None:
        """Take the times of each trainer of `transformers.trainer`."""
        marks = self

        def note(name: str) -> Any:
            def take(_self: Any, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
                if name == "step_begin":
                    marks.take("step_over", state.global_step)  # the one before it
                    marks.turn()
                marks.take(name, state.global_step)

            return take

        names = ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_save", "on_train_end")
        callback = type("Marked", (module.TrainerCallback,), {name: note(name.removeprefix("on_")) for name in names})
        module.DEFAULT_CALLBACKS.append(callback)
        determine = module.Trainer._determine_best_metric

        def determined(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            marks.take("evaluated", trainer.state.global_step)
            return determine(trainer, *args, **kwargs)

        module.Trainer._determine_best_metric = determined


def run_honed(job_dir: Path, found_path: Path) -> None:
    """Run honed's worker."""
    from honed.job import event
    from honed.worker import __main__ as worker

    marks = Marks()
    marks.watch(importlib.import_module("transformers.trainer"))
    sys.argv = ["honed.worker", str(job_dir), "1"]
    status = worker.main()
    attempt_dir = job_dir / "attempts/1"
    if status:
        raise SystemExit((attempt_dir / "result.json").read_text())
    told = event.read(PersonPath.own(attempt_dir / "events.jsonl"), 0).events
    ended_at = next(each.time for each in told if each.kind == "stage" and each.data["stage"] == "export")
    found_path.write_text(
        json.dumps(
            {
                "marks": marks.times,
                "ended_at": ended_at,
                "losses": [each.data["loss"] for each in told if each.kind == "step"],
                "eval_losses": [each.data["metrics"]["eval_loss"] for each in told if each.kind == "evaluation"],
                "texts": [
                    [row["prediction"] for row in each.data["rows"]] for each in told if each.kind == "predictions"
                ],
            }
        )
    )
    worker.end(status)


def run_bare(root: Path, output: Path, found_path: Path, case: Case) -> None:
    """Run SFTTrainer as in its documentation, with a callback that generates answers."""
    import torch
    import transformers.trainer
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    marks = Marks()
    marks.watch(transformers.trainer)
    data = load_dataset(
        "json",
        data_files={"train": str(root / "train.jsonl"), "test": str(root / "held-out.jsonl")},
        cache_dir=str(output / "cache"),
    )
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    set_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    if case.rank:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case.lora))
    held_out = list(data["test"])
    chosen = sorted(random.Random(SEED).sample(range(len(held_out)), NUM_SAMPLES))
    prompts = [held_out[place]["prompt"] for place in chosen]
    texts = []

    class Answers(TrainerCallback):
        def on_evaluate(self, _args: Any, _state: Any, _control: Any, *, model: Any, **_kwargs: Any) -> None:
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            model.eval()
            with torch.no_grad():
                output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            model.train()
            new = output[:, inputs["input_ids"].shape[1] :]
            texts.append([text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)])

    arguments = SFTConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        report_to="none",
        loss_type="nll",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_total_limit=2,
        eval_on_start=case.evaluates,
        **case.training,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["test"] if case.evaluates else None,
        processing_class=tokenizer,
        callbacks=[Answers()],
    )
    trainer.train()
    ended_at = time.time()
    trainer.save_model(str(output / "output"))
    history = trainer.state.log_history
    found_path.write_text(
        json.dumps(
            {
                "marks": marks.times,
                "ended_at": ended_at,
                "losses": [entry["loss"] for entry in history if "loss" in entry],
                "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
                "texts": texts,
            }
        )
    )


# --- pairs of runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained; `embeddings`: rows of the model's embeddings, 0 for the tokenizer's; `rank` 0: all weights."""

    steps: int
    every: int
    batch: int
    hidden: int
    layers: int
    rank: int
    embeddings: int
    evaluates: bool

    @property
    def lora(self) -> dict[str, Any]:
        return {"r": self.rank, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}

    @property
    def training(self) -> dict[str, Any]:
        return {
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "max_length": 512,
            "logging_steps": 1,
            "save_steps": self.every,
            **({"eval_strategy": "steps", "eval_steps": self.every} if self.evaluates else {}),
        }

    @property
    def keys(self) -> dict[str, Any]:
        """The job's keys."""
        answers = {"num_samples": NUM_SAMPLES, "max_new_tokens": MAX_NEW_TOKENS, "max_share": None}
        lora = {"lora": {key: self.lora[key] for key in ("r", "lora_alpha")}} if self.rank else {}
        return {
            "dtype": "float32",
            "training": self.training,
            "save_interval_sec": None,
            "predictions": answers if self.evaluates else {"sample_frequency": "off"},
            **lora,
        }


def build(root: Path, case: Case) -> None:
    """Write a model, and rows of prompts and completions of many lengths."""
    import demonstration
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    demonstration.build(root)
    rng = random.Random(0)
    facts = demonstration.facts()
    for name, number in (("train", NUM_ROWS), ("held-out", NUM_HELD_OUT)):
        rows = []
        for _ in range(number):
            drawn = rng.sample(facts, rng.randint(1, 12))
            asked = " ".join(f"What is the capital of {country}?" for country, _ in drawn)
            rows.append({"prompt": f"{asked} ", "completion": ", ".join(capital for _, capital in drawn)})
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=max(case.embeddings, len(tokenizer)),
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=max(case.hidden // 32, 1),
        num_key_value_heads=max(case.hidden // 32, 1),
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(root / "model")
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, rank {case.rank}")


@dataclass(frozen=True)
class Run:
    """Times of one run, in seconds."""

    steps: Sequence[float]  #: each of the steps alone
    cpu_steps: Sequence[float]  #: the same in CPU time
    rests: Sequence[float]  #: of each step what follows the forward and backward pass
    saves: Sequence[float]  #: the time of the trainer's thread for each checkpoint
    evaluations: Sequence[float]  #: with their predictions
    whole: float
    cpu_whole: float  #: CPU time from the first step to the last
    process: float
    told: dict[str, Any]

    @classmethod
    def read(cls, found_path: Path, process_sec: float, every: int) -> Run:
        found = json.loads(found_path.read_text())
        marks, cpu = (
            {name: {int(step): at[n] for step, at in times.items()} for name, times in found["marks"].items()}
            for n in (0, 1)
        )
        begun, over, ended, evaluated, saved = (
            marks.get(name, {}) for name in ("step_begin", "step_over", "step_end", "evaluated", "save")
        )
        computed = marks["pre_optimizer_step"]
        first, last = min(begun), max(begun)
        turns = [n for n in begun if n + 1 in over]
        alone = [n for n in turns if (n + 1) % every and n != first]
        cpu_begun, cpu_over, cpu_end = cpu["step_begin"], cpu["step_over"], max(cpu["train_end"].values())
        return cls(
            [over[n + 1] - begun[n] for n in alone],
            [cpu_over[n + 1] - cpu_begun[n] for n in alone],
            [over[n + 1] - computed[n] for n in alone],
            [saved[n] - evaluated.get(n, ended[n]) for n in saved],
            [evaluated[n] - ended[n] for n in evaluated if n in ended],
            sum(over[n + 1] - begun[n] for n in turns) + found["ended_at"] - begun[last],
            sum(cpu_over[n + 1] - cpu_begun[n] for n in turns) + cpu_end - cpu_begun[last],
            process_sec,
            found,
        )


class Process:
    """One side in a process of its own."""

    def __init__(
        self,
        side: str,
        root: Path,
        number: int,
        case: Case,
        *,
        turns: tuple[int, int] | None = None,
        is_first: bool = False,
    ) -> None:
        """Start it; `turns` and `is_first` as in the environment."""
        from benchmark_start import job, worker_environment

        self._output = root / f"{side}-{number}"
        self._found_path, self._log_path = (root / f"{side}-{number}.{end}" for end in ("json", "log"))
        self._every = case.every
        command = [sys.executable, __file__, f"--{side}"]
        environment = worker_environment() | {"TOKENIZERS_PARALLELISM": "false"}
        if side == "honed":
            held_out = [{"path": str(root / "held-out.jsonl")}] if case.evaluates else []
            keys = {**case.keys, "eval_datasets": held_out}
            self._output = job(root, keys)
            command += [str(self._output), str(self._found_path)]
        else:
            self._output.mkdir()
            command += [str(root), str(self._output), str(self._found_path), json.dumps(vars(case))]
        if turns is not None:
            environment[TURNS_VARIABLE] = f"{turns[0]} {turns[1]}"
            if is_first:
                environment[FIRST_VARIABLE] = "1"
        self._started = time.perf_counter()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=turns or ())

    def result(self) -> Run:
        """Wait for its end."""
        self._process.wait()
        process_sec = time.perf_counter() - self._started
        if self._process.returncode:
            raise SystemExit(self._log_path.read_text()[-5000:])
        shutil.rmtree(self._output)
        return Run.read(self._found_path, process_sec, self._every)


def pair_in_turn(sides: Sequence[str], root: Path, number: int, case: Case) -> dict[str, Run]:
    """Run both sides at the same time, one step of each after the other."""
    (first_in, first_out), (second_in, second_out) = os.pipe(), os.pipe()
    first = Process(sides[0], root, number, case, turns=(first_in, second_out), is_first=True)
    second = Process(sides[1], root, number, case, turns=(second_in, first_out))
    for fd in (first_in, first_out, second_in, second_out):
        os.close(fd)
    return {sides[0]: first.result(), sides[1]: second.result()}


def pair_apart(sides: Sequence[str], root: Path, number: int, case: Case) -> dict[str, Run]:
    """Run one side after the other."""
    found = {}
    for side in sides:
        found[side] = Process(side, root, number, case).result()
        os.sync()  # what this run has left to the disk is not the next one's
    return found


def compare(pairs: Sequence[tuple[Run, Run]]) -> None:
    """Print what the two sides have told: losses and texts must be those of the same work."""
    ours, theirs = pairs[0][0].told, pairs[0][1].told
    for name in ("losses", "eval_losses") if ours["eval_losses"] else ("losses",):
        assert len(ours[name]) == len(theirs[name]), name
        gap = max(abs(a - b) for a, b in zip(ours[name], theirs[name], strict=True))
        print(f"{name}: {len(ours[name])}, {'equal' if not gap else f'differ by at most {gap:.2g}'}")
    rounds = list(zip(ours["texts"], theirs["texts"], strict=True))
    num_different = sum(a != b for pair in rounds for a, b in zip(*pair, strict=True))
    print(f"predictions: {len(rounds)} rounds of {NUM_SAMPLES}, {num_different} texts differ")
    if max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) > TOLERANCE:
        raise SystemExit("the two sides have not trained the same")


def row(name: str, pairs: Sequence[tuple[Run, Run]], figure: Any, scale: float, places: int) -> str:
    """Return a row with the medians of both sides, and of the ratios of the pairs, with their range."""
    ours, theirs = ([figure(pair[side]) for pair in pairs] for side in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    shown = [f"{statistics.median(values) * scale:.{places}f}" for values in (ours, theirs)]
    return (
        f"| {name} | {shown[0]} | {shown[1]} | {statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="run one side after the other")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints and evaluations")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16, help="0: all weights are trained")
    parser.add_argument(
        "--embeddings", type=int, default=0, help="train a whole model with so many, and do not evaluate"
    )
    parser.add_argument("--dir", type=Path, default=None, help="directory for the checkpoints, on the disk to measure")
    options = vars(parser.parse_args())
    num_pairs, place, is_apart = (options.pop(name) for name in ("pairs", "dir", "apart"))
    options["evaluates"] = not options["embeddings"]
    if options["embeddings"]:
        options["rank"] = 0
    case = Case(**options)
    with tempfile.TemporaryDirectory(prefix="honed-long-", dir=place) as name:
        root = Path(name)
        build(root, case)
        pairs = []
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {num_pairs} pairs")
        for number in range(num_pairs):
            sides = ("honed", "bare") if number % 2 else ("bare", "honed")  # neither always comes first
            found = (pair_apart if is_apart else pair_in_turn)(sides, root, number, case)
            pairs.append((found["honed"], found["bare"]))
            ratio = pairs[-1][0].whole / pairs[-1][1].whole
            print(f"pair {number + 1}: whole {ratio:.3f}, load {os.getloadavg()[0]:.1f}", flush=True)
        compare(pairs)
    print(f"\n| {case.steps} steps | honed | bare | ratio, pair by pair |\n|---|---|---|---|")
    print(row("a step alone, median, ms", pairs, lambda run: statistics.median(run.steps), 1e3, 2))
    print(row("a step alone, mean, ms", pairs, lambda run: statistics.mean(run.steps), 1e3, 2))
    print(row("a step alone, median, CPU ms", pairs, lambda run: statistics.median(run.cpu_steps), 1e3, 2))
    print(row("a step alone, mean, CPU ms", pairs, lambda run: statistics.mean(run.cpu_steps), 1e3, 2))
    print(row("of it, after the backward pass, ms", pairs, lambda run: statistics.median(run.rests), 1e3, 2))
    if case.evaluates:
        print(row("an evaluation with predictions, ms", pairs, lambda run: statistics.median(run.evaluations), 1e3, 0))
    print(row("a checkpoint, ms", pairs, lambda run: statistics.median(run.saves), 1e3, 0))
    print(row("the whole, s", pairs, lambda run: run.whole, 1, 2))
    print(row("from the first step to the last, CPU s", pairs, lambda run: run.cpu_whole, 1, 2))
    if is_apart:
        print(row("the process, s", pairs, lambda run: run.process, 1, 2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--honed"]:
        run_honed(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--bare"]:
        run_bare(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), Case(**json.loads(sys.argv[5])))
    else:
        main()
