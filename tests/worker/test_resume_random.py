"""A resumed run continues its draws from Python's, NumPy's and torch's random numbers where it stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from worker.conftest import MakeJob
from worker.test_matrix import Course, assert_same, course_of
from worker.test_resume_state import cut, keys, resumed

SOURCES = ("random", "numpy", "torch")
#: Of all 11 steps: 5 in each epoch, of which the last is cut short.
NUM_BATCHES = 19
Drawn = list[tuple[float, float, float]]
KEYS = keys(eval_strategy="steps", eval_steps=4) | {
    "predictions": {"num_samples": 2, "max_new_tokens": 4, "sample_frequency": 3, "sample": {"temperature": 1.5}}
}


@dataclass
class Noise:
    """A hook that multiplies the embeddings of each training batch by a random factor.

    Real models draw outside of torch, too: Whisper's masks and phi4_multimodal's positions come from `np.random`,
    MusicGen's skipped layers from `random`.
    """

    drawn: Drawn = field(default_factory=list)

    def __call__(self, module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not (isinstance(module, torch.nn.Embedding) and module.training):
            return None
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand([]))))
        return output * (0.5 + sum(self.drawn[-1]) / len(SOURCES))

    def take(self) -> Drawn:
        """Return the draws since the last call."""
        taken, self.drawn = self.drawn, []
        return taken


@pytest.fixture
def noise() -> Iterator[Noise]:
    made = Noise()
    handle = register_module_forward_hook(made)
    yield made
    handle.remove()


def disturb() -> None:
    """Seed the random numbers anew, as in a process that has just started."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[Course, Drawn]]:
    """A cache of the one uncut run that all others are compared with, made when it is first needed."""
    return []


@pytest.mark.parametrize(
    ("where", "step"), [("step", 4), ("step", 6), ("accumulation", 6), ("evaluation", 8), ("predictions", 9)]
)  # the middle and the end of an epoch, the second half of a step, and the time between two steps
def test_a_resumed_run_draws_the_same_numbers_in_each_step(
    make_job: MakeJob, noise: Noise, undisturbed: list[tuple[Course, Drawn]], where: str, step: int
) -> None:
    if not undisturbed:
        job = make_job(**KEYS)
        undisturbed.append((course_of(job, job.run()), noise.take()))
    [(course, expected)] = undisturbed
    assert len({number for each in expected for number in each}) == len(SOURCES) * NUM_BATCHES, "each is drawn anew"
    job = make_job(**KEYS)
    disturb()
    first = cut(job, where, step)
    disturb()
    second = resumed(job)
    found = noise.take()
    for place, name in enumerate(SOURCES):
        assert [each[place] for each in found] == [each[place] for each in expected], name
    assert_same(course_of(job, first, second), course)
