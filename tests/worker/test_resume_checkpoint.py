"""A checkpoint counts when it is complete, whatever happened to it and wherever its writer died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.system.error import InterruptedRunError
from honed.worker.train import checkpoint, digest
from honed.worker.train.checkpoint import Progress

#: Two pieces and a bit.
LARGE_BYTES = 2 * digest.PIECE_BYTES + 5


def write(checkpoints_dir: Path, step: int, *, large_bytes: int = 0) -> Path:
    """Write a checkpoint as the trainer does: in a new directory, sealed, moved to its place."""
    made = checkpoint.new_dir(checkpoints_dir) / f"checkpoint-{step}"
    fill(made, step, large_bytes=large_bytes)
    checkpoint.seal(made, Progress(num_trained_tokens=step, scores={"4": {"exact_match": 0.5}}))
    return checkpoint.put(made, checkpoints_dir)


def fill(path: Path, step: int, *, large_bytes: int = 0) -> None:
    path.mkdir()
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (path / "optimizer.pt").write_bytes(os.urandom(5000))
    if large_bytes:
        with (path / "model.safetensors").open("wb") as file:
            file.write(os.urandom(1000))
            file.truncate(large_bytes)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_the_newest_is_found_with_its_progress(place: Path) -> None:
    for step in (9, 10, 100):
        write(place, step)
    found, set_aside = checkpoint.find(place)
    assert found is not None
    assert (found.path, found.step, set_aside) == (place / "checkpoint-100", 100, [])
    assert found.progress == Progress(num_trained_tokens=100, scores={"4": {"exact_match": 0.5}})
    assert names(place) == {"checkpoint-9", "checkpoint-10", "checkpoint-100"}


def test_where_there_is_none_none_is_found(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "nowhere") == (None, [])
    assert checkpoint.find(tmp_path) == (None, [])


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and update its hash."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    change(manifest)
    del manifest["sha256"]
    (path / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": checkpoint._fingerprint(manifest)}))


def replace_by_link(path: Path) -> None:
    shutil.move(path, path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is cut short": (lambda at: os.truncate(at / "optimizer.pt", 4993), "optimizer.pt has 4993 bytes instead"),
    "a file is longer": (lambda at: os.truncate(at / "optimizer.pt", 5001), "optimizer.pt has 5001 bytes instead"),
    "a file is missing": (lambda at: (at / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "a bit is flipped": (lambda at: flip(at / "optimizer.pt", 4999), "optimizer.pt was changed"),
    "the first bit of a large file is flipped": (lambda at: flip(at / "model.safetensors", 0), "model.safetensors was"),
    "a bit deep in a large file is flipped": (
        lambda at: flip(at / "model.safetensors", digest.PIECE_BYTES), "model.safetensors was"),
    "the last bit of a large file is flipped": (
        lambda at: flip(at / "model.safetensors", LARGE_BYTES - 1), "model.safetensors was"),
    "a file is a link": (lambda at: replace_by_link(at / "optimizer.pt"), "optimizer.pt is not a regular file"),
    "a file is a directory": (
        lambda at: ((at / "optimizer.pt").unlink(), (at / "optimizer.pt").mkdir()), "is not a regular file"),
    "it has no manifest": (lambda at: (at / "MANIFEST.json").unlink(), "it is incomplete"),
    "its manifest is empty": (lambda at: (at / "MANIFEST.json").write_text(""), "is not valid"),
    "its manifest is a list": (lambda at: (at / "MANIFEST.json").write_text("[1]"), "is not valid"),
    "its manifest is binary": (lambda at: (at / "MANIFEST.json").write_bytes(b"\xff\0\x80"), "is not valid"),
    "its manifest goes on after its end": (
        lambda at: (at / "MANIFEST.json").open("a").write("}garbage"), "is not valid"),
    "its manifest is a directory": (
        lambda at: ((at / "MANIFEST.json").unlink(), (at / "MANIFEST.json").mkdir()), "Is a directory"),
    "a figure in its manifest is another": (
        lambda at: (at / "MANIFEST.json").write_text(
            (at / "MANIFEST.json").read_text().replace('"num_trained_tokens": 6', '"num_trained_tokens": 7')),
        "MANIFEST.json was changed"),
    "its manifest names no file": (lambda at: edit(at, lambda found: found["files"].clear()), "does not list trainer_"),
    "its manifest has no files": (lambda at: edit(at, lambda found: found.pop("files")), "is not valid"),
    "its manifest has files without sizes": (
        lambda at: edit(at, lambda found: found["files"]["optimizer.pt"].clear()), "is not valid"),
    "its manifest leads elsewhere": (
        lambda at: edit(at, lambda found: found["files"].update({"../checkpoint-4/optimizer.pt": {}})),
        "outside the checkpoint"),
    "it is another step's": (lambda at: edit(at, lambda found: found.update(step=5)), "it is of step 5"),
    "it is a file": (lambda at: (shutil.rmtree(at), at.write_text("checkpoint")), "not a directory of its own"),
    "it is a link to one that is whole": (replace_by_link, "not a directory of its own"),
    "it is a link to nothing": (lambda at: (shutil.rmtree(at), at.symlink_to("nothing")), "not a directory of its own"),
    "it is empty": (lambda at: (shutil.rmtree(at), at.mkdir()), "it is incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_what_is_not_whole_is_set_aside_and_the_one_before_it_is_found(place: Path, how: str) -> None:
    damage, why = DAMAGES[how]
    write(place, 4)
    newest = write(place, 6, large_bytes=LARGE_BYTES if "large" in how else 0)
    damage(newest)
    found, set_aside = checkpoint.find(place)
    assert found is not None
    assert found.step == 4
    [item] = set_aside
    assert (item.name, item.path) == ("checkpoint-6", place / "checkpoint-6.damaged")
    assert why in item.why
    assert os.path.lexists(item.path)
    assert not os.path.lexists(newest)
    assert checkpoint.find(place) == (found, [])  # and the next attempt is not told of it again
    write(place, 6)
    assert checkpoint.find(place)[0] == checkpoint.Checkpoint(
        newest, 6, Progress(num_trained_tokens=6, scores={"4": {"exact_match": 0.5}})
    )


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_directory_that_cannot_be_read_is_set_aside(place: Path) -> None:
    """An unprivileged user reads the checkpoints, since no mode would stop root."""
    write(place, 4)
    write(place, 6)
    (place / "checkpoint-6").chmod(0)
    for path in [place, *place.rglob("*")]:
        os.chown(path, 65534, 65534)
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        os.chdir(place)  # the way there is root's alone
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        found, set_aside = checkpoint.find(Path())
        os.write(sender, json.dumps([found and found.step, [item.why for item in set_aside]]).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        assert json.load(file) == [4, ["checkpoint-6: Permission denied"]]
    os.waitpid(child, 0)
    assert names(place) == {"checkpoint-4", "checkpoint-6.damaged"}


def test_where_all_are_damaged_all_are_set_aside(place: Path) -> None:
    for step in (4, 6):
        flip(write(place, step) / "optimizer.pt", 3)
    found, set_aside = checkpoint.find(place)
    assert found is None
    assert [item.name for item in set_aside] == ["checkpoint-6", "checkpoint-4"]


def test_one_that_is_damaged_twice_has_two_places(place: Path) -> None:
    for _ in range(2):
        flip(write(place, 6) / "optimizer.pt", 3)
        checkpoint.find(place)
    assert names(place) == {"checkpoint-6.damaged", "checkpoint-6.damaged-2"}


def test_what_a_later_version_has_to_say_harms_no_checkpoint(place: Path) -> None:
    edit(write(place, 3), lambda found: found["progress"].update(num_moons=2))
    found, _ = checkpoint.find(place)
    assert found is not None
    assert found.progress.num_trained_tokens == 3


def test_looking_can_be_stopped(place: Path) -> None:
    write(place, 3)

    def stop() -> None:
        raise InterruptedRunError("stopped on request")

    with pytest.raises(InterruptedRunError):
        checkpoint.find(place, beat=stop)
    assert checkpoint.find(place)[0] is not None


@pytest.mark.parametrize("had", [[3], [4], [2, 4]], ids=["newer", "again", "again-and-older"])
def test_a_writer_that_is_killed_at_any_operation_leaves_a_whole_one(
    place: Path, tmp_path: Path, had: list[int]
) -> None:
    """The complete checkpoint is of the same step, or of the one before; this also holds with a limit of one."""
    for moment in range(1, 60):
        shutil.rmtree(place)
        place.mkdir()
        for step in had:
            write(place, step)
        old = {step: (place / f"checkpoint-{step}/optimizer.pt").read_bytes() for step in had}
        if (child := os.fork()) == 0:
            kill_at(place, moment)
        status = os.waitpid(child, 0)[1]
        found, set_aside = checkpoint.find(place)
        assert found is not None, moment
        assert not set_aside, (moment, set_aside)
        assert found.step in {4, max(had)}
        if found.step == 3:
            assert (found.path / "optimizer.pt").read_bytes() == old[3]
        if status == 0:
            assert names(place) == {"checkpoint-4"}
            assert moment > 15
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        write(place, 5)
        checkpoint.rotate(place, limit=1, keep=set())
        assert names(place) == {"checkpoint-5"}  # nothing is left behind
    raise AssertionError("it never came to its end")


def kill_at(place: Path, moment: int) -> None:
    """In a child process, write, rotate, and die at the n-th operation on a file."""
    operations = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree"}
    count = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        # Within a removal the paths are names beside a descriptor, so all of this process count.
        if event in operations:
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    write(place, 4)
    checkpoint.rotate(place, limit=1, keep=set())
    os._exit(0)


def test_rotation_keeps_the_newest_and_the_best(place: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write(place, step)
    checkpoint.rotate(place, limit=2, keep={place / "checkpoint-2"})
    assert names(place) == {"checkpoint-2", "checkpoint-4", "checkpoint-5"}
    checkpoint.rotate(place, limit=0, keep=set())
    assert names(place) == {"checkpoint-5"}


def test_rotation_does_not_count_what_is_damaged_and_removes_it_in_the_end(place: Path) -> None:
    write(place, 2)
    flip(write(place, 4) / "optimizer.pt", 3)
    checkpoint.find(place)
    write(place, 5)
    checkpoint.rotate(place, limit=2, keep=set())
    assert names(place) == {"checkpoint-2", "checkpoint-4.damaged", "checkpoint-5"}
    write(place, 6)
    checkpoint.rotate(place, limit=2, keep=set())
    assert names(place) == {"checkpoint-5", "checkpoint-6"}


def test_whoever_may_read_the_directory_may_read_what_safetensors_wrote(place: Path) -> None:
    made = checkpoint.new_dir(place) / "checkpoint-1"
    fill(made, 1)
    made.chmod(0o755)
    (made / "optimizer.pt").chmod(0o600)
    checkpoint.seal(made, Progress())
    assert (checkpoint.put(made, place) / "optimizer.pt").stat().st_mode & 0o777 == 0o644
