"""Comparison of ways to do full fine-tuning: final loss, and number of weights that changed. Rows for
docs/precision.md.

A small Qwen3 learns in float32 (wrong capitals; sums modulo 11) and is stored in bfloat16; then each variant fine-tunes
that checkpoint to other facts (the right capitals; differences modulo 11), from the same rows in the same order.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import demonstration
import torch

from honed.worker.train.optimizer import CompensatedAdamW, eight_bit

BATCH, MODULUS = 16, 11
Row = tuple[list[int], int]  #: tokens, and the number of tokens of the question


class Rounded(torch.optim.Optimizer):
    """Other tools' optimizers for bfloat16 weights, for comparison: the moments' dtype and the rounding vary."""

    def __init__(self, params: Any, lr: float, *, moments: torch.dtype, how: str) -> None:
        super().__init__(params, {"lr": lr})
        self._moments, self._how = moments, how
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state, gradient = self.state[p], p.grad.float()
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p, dtype=self._moments)}
                    state |= {"v": torch.zeros_like(p, dtype=self._moments), "lost": torch.zeros_like(p)}
                state["step"] += 1
                mean = state["m"].float().lerp_(gradient, 0.1)
                square = state["v"].float().mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                state["m"].copy_(mean)
                state["v"].copy_(square)
                root = (square.sqrt() / (1 - 0.999 ** state["step"]) ** 0.5).add_(1e-8)
                self._move(p, state, mean / root * (-group["lr"] / (1 - 0.9 ** state["step"])))

    def _move(self, p: Any, state: Any, update: torch.Tensor) -> None:
        if self._how == "kahan":
            state["lost"].add_(update.to(p.dtype))
            before = p.clone()
            p.add_(state["lost"])
            state["lost"].add_(before.sub_(p))
            return
        bits = (p.float() + update).view(torch.int32)
        bits += torch.randint(0, 2**16, bits.shape, dtype=torch.int32, generator=self._generator)
        p.copy_((bits & -65536).view(torch.float32))


def _bitsandbytes(params: Any, lr: float) -> torch.optim.Optimizer:
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(params, lr=lr, weight_decay=0.0)
    return optimizer


def _torch(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.0, fused=True)


Maker = Callable[[Any, float], torch.optim.Optimizer]
#: Label in the table → dtype of the weights, the optimizer, bytes per parameter.
RUNGS: dict[str, tuple[torch.dtype, Maker, int]] = {
    "float32, AdamW": (torch.float32, _torch, 16),
    "float32, 8-bit AdamW": (torch.float32, _bitsandbytes, 10),
    "compensated, AdamW": (torch.bfloat16, lambda p, lr: CompensatedAdamW(p, lr=lr), 14),
    "compensated, 8-bit AdamW": (torch.bfloat16, lambda p, lr: eight_bit()(p, lr=lr, weight_decay=0.0), 8),
    "plain bfloat16, AdamW": (torch.bfloat16, _torch, 8),
    "plain bfloat16, 8-bit AdamW": (torch.bfloat16, _bitsandbytes, 6),
    "not used: Kahan, moments in bfloat16": (
        torch.bfloat16,
        lambda p, lr: Rounded(p, lr, moments=torch.bfloat16, how="kahan"),
        10,
    ),
    "not used: stochastic rounding, moments in float32": (
        torch.bfloat16,
        lambda p, lr: Rounded(p, lr, moments=torch.float32, how="stochastic"),
        12,
    ),
}


def capitals(*, is_right: bool) -> list[Row]:
    """Return facts with characters as tokens; the wrong capitals are those of the next country."""
    facts = demonstration.facts()
    answers = [capital for _, capital in facts]
    if not is_right:
        answers = answers[1:] + answers[:1]
    return [_row(f"capital of {country}:", answer) for (country, _), answer in zip(facts, answers, strict=True)]


def _row(question: str, answer: str) -> Row:
    return [ord(letter) % 128 for letter in f"{question}{answer}\n"], len(question)


def arithmetic(*, is_difference: bool) -> list[Row]:
    """Return all sums, or all differences, of two numbers; each number is one token."""
    rows = []
    for a in range(MODULUS):
        for b in range(MODULUS):
            rows.append(([a, 100, b, 101, (a - b if is_difference else a + b) % MODULUS], 4))
    return rows


TASKS: dict[str, tuple[list[Row], list[Row], int]] = {
    "capitals": (capitals(is_right=False), capitals(is_right=True), 200),
    "arithmetic": (arithmetic(is_difference=False), arithmetic(is_difference=True), 400),
}


def batches(rows: list[Row], num_steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order, drawn = random.Random(seed), []
    for _ in range(num_steps):
        if len(drawn) < BATCH:
            drawn = order.sample(rows, len(rows))
        chosen, drawn = drawn[:BATCH], drawn[BATCH:]
        width = max(len(tokens) for tokens, _ in chosen)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in chosen])
        labels = [[-100] * asked + tokens[asked:] + [-100] * (width - len(tokens)) for tokens, asked in chosen]
        yield ids, torch.tensor(labels)


def fit(model: Any, optimizer: Any, rows: list[Row], num_steps: int, seed: int, *, has_autocast: bool) -> list[float]:
    """Train with a linear decay, clipping the norm as TRL does. Returns the losses."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    losses = []
    for ids, labels in batches(rows, num_steps, seed):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def base(seed: int, task: str) -> Any:
    """Return a model in bfloat16 that has learned the other facts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )
    before, _, num_steps = TASKS[task]
    fit(model, _torch(model.parameters(), 2e-3), before, num_steps, seed, has_autocast=False)
    return model.to(torch.bfloat16)


def measure(name: str, start: Any, task: str, learning_rate: float, num_steps: int, seed: int) -> tuple[float, float]:
    """Return the mean loss of the last tenth, and the share of weights that changed in the stored dtype."""
    dtype, make, _ = RUNGS[name]
    model = copy.deepcopy(start).to(dtype)
    optimizer = make(list(model.parameters()), learning_rate)
    losses = fit(model, optimizer, TASKS[task][1], num_steps, seed, has_autocast=dtype == torch.float32)
    pairs = list(zip(model.parameters(), start.parameters(), strict=True))
    changed = sum(int((now.detach() != then.detach().to(dtype)).sum()) for now, then in pairs)
    tail = losses[-max(1, num_steps // 10) :]
    return statistics.fmean(tail), changed / sum(now.numel() for now, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rates", default="2e-5,2e-4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates = [float(rate) for rate in options.rates.split(",")]
    found: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        for task in TASKS:
            start = base(seed, task)
            for rate in rates:
                for name in RUNGS:
                    figures = measure(name, start, task, rate, options.steps, seed)
                    print(seed, task, rate, name, figures, file=sys.stderr, flush=True)
                    found.setdefault((name, task, rate), []).append(figures)
    columns = [(task, rate) for task in TASKS for rate in rates]
    print(f"| weights, optimizer | bytes | {' | '.join(f'{task}, {rate:g}' for task, rate in columns)} |")
    print(f"|---|---|{'---|' * len(columns)}")
    for name, (_, _, num_bytes) in RUNGS.items():
        cells = []
        for task, rate in columns:
            losses, shares = zip(*found[name, task, rate], strict=True)
            cells.append(
                f"{statistics.fmean(losses):.4f} ± {statistics.pstdev(losses):.4f}, {statistics.fmean(shares):.0%}"
            )
        print(f"| {name} | {num_bytes} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
