"""What ranks tell each other."""

from __future__ import annotations

import errno
import json
import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from honed.inputs.media import Media
from honed.system.error import DiskShortError, EnvironmentInvalidError, HonedError, InternalError, OutOfMemoryError
from honed.worker import message
from honed.worker.message import LostRankError
from honed.worker.parallel import Asked
from honed.worker.train.checkpoint import Checkpoint, Progress, SetAside
from honed.worker.train.prediction import Question


def sent(value: object) -> object:
    return message.load(message.dump(value), "rank 1")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.1, -0.0, math.inf, "\udc80⏎", []],
        ([1, 2], [0.3, None]),
        {"a": {1: ()}, "tuple": [frozenset({"a"})]},
        (Checkpoint(Path("/a/checkpoint-2"), 2, Progress(running_losses=[1e-300], divergence={"first": [0.5]})), []),
        (None, [SetAside("checkpoint-2", Path("/a/checkpoint-2.damaged"), "a hash")]),
        Asked([Question("p", [1, 2], "g", "t", (Media("image", Path("/i"), data=b"\0\xff"),), frozenset({"d"}))]),
        random.getstate(),
    ],
)
def test_a_value_arrives_as_it_was_sent(value: object) -> None:
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value)


def test_a_set_arrives_with_all_its_members() -> None:
    # Their order hangs on the hash seed and on how the set was made, and so does its repr.
    assert sent(frozenset("abcdefgh")) == frozenset("abcdefgh")
    assert sent({"b", "a"}) == {"a", "b"}


def test_the_random_states_arrive_with_all_their_bits() -> None:
    numbers, tensor = np.random.get_state(), torch.random.get_rng_state()
    name, found, *others = sent(numbers)  # type: ignore[misc]
    assert (name, found.dtype, others) == (numbers[0], np.uint32, list(numbers[2:]))
    assert (found == numbers[1]).all()
    np.random.set_state((name, found, *others))
    torch.random.set_rng_state(sent([tensor])[0])  # type: ignore[index]
    assert torch.equal(torch.random.get_rng_state(), tensor)


def test_errors_keep_what_decides_about_them() -> None:
    short = DiskShortError("no room for ‹x›", hint="h", fix={"training.max_steps": 3}, evidence="e")
    short.needed_bytes = 7
    found = sent(short)
    assert isinstance(found, DiskShortError)
    assert (found.as_dict(), found.said, found.needed_bytes) == (short.as_dict(), short.said, 7)
    assert isinstance(sent(OutOfMemoryError("m")), OutOfMemoryError)
    assert isinstance(sent(LostRankError("rank 0 failed")), LostRankError)
    full = sent(OSError(errno.ENOSPC, "No space left on device", "/a"))
    assert isinstance(full, OSError)
    assert (full.errno, str(full)) == (errno.ENOSPC, "[Errno 28] No space left on device: '/a'")
    assert isinstance(sent(FileNotFoundError(errno.ENOENT, "No such file")), FileNotFoundError)
    assert repr(sent(RuntimeError("write failed"))) == "RuntimeError('write failed')"


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"a": 1}),
        b"",
        b"\xff",
        b"[1,",
        b"[" * 200_000,
        b'{"os.system": ["true"]}',
        b'{"Path": ["/"]}',
        b'{"Checkpoint": [1]}',
        b'{"Checkpoint": {"path": 1}}',
        b'{"error": []}',
        b'{"error": {"code": "stalled"}}',
        b'{"tuple": [], "list": []}',
        b'{"numbers": "AAA"}',
        b'{"tensor": 1}',
        b'{"set": [[1]]}',
        b'{"dict": [[1]]}',
        b'{"os_error": [1]}',
    ],
)
def test_what_no_rank_sends_is_refused(data: bytes) -> None:
    with pytest.raises(EnvironmentInvalidError, match="rank 1 sent a message that is none of honed's") as found:
        message.load(data, "rank 1")
    assert "who else reaches the ports" in found.value.hint


@pytest.mark.parametrize("num_bytes", [-1, 0, message.MAX_BYTES + 1, 1 << 62])
def test_an_absurd_length_is_refused(num_bytes: int) -> None:
    with pytest.raises(EnvironmentInvalidError, match=str(num_bytes)):
        message.check_length(num_bytes, "rank 1")


def test_a_value_of_another_type_than_ones_own_is_refused() -> None:
    for found, own in ((None, "a"), ("a", None), (OSError(), RuntimeError()), (True, False)):
        message.check_alike(found, own, "rank 1")
    with pytest.raises(EnvironmentInvalidError, match="a str in the place of a tuple"):
        message.check_alike("a", (1, 2), "rank 1")


def test_an_object_without_a_form_is_not_sent() -> None:
    for value in (object(), json.JSONDecoder(), HonedError, torch.zeros(1), Path):
        with pytest.raises(InternalError, match="cannot be sent"):
            message.dump([value])
