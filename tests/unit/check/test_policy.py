"""A job's rights to read and write, on real files; and the copies that `submit --stage` makes."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from honed.check import preflight
from honed.check.checklist import Asked
from honed.check.policy import Named, Policy, check_granted
from honed.cli import stage
from honed.job import staging
from honed.job.plan_file import Grant
from honed.spec.config import Config, PolicyConfig
from honed.system import access
from honed.system.access import Acl, Person
from honed.system.device import Device
from honed.system.error import DatasetError, HonedError, ModelError, SpecError
from honed.system.layout import Layout
from zoo import plain

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)
WORKERS = Person(54321, frozenset({54321}), "honed-job")


class Desk:
    """A model and a data set in srv/, and an instance beside it."""

    def __init__(self, path: Path) -> None:
        self.layout = Layout(path / "root")
        self.layout.jobs_dir.mkdir(parents=True)
        self.srv = path / "srv"
        self.srv.mkdir()
        self.model = plain.write_base_model(self.srv / "model")
        self.rows = plain.write_dataset(self.srv / "rows.jsonl")
        self.path = path

    def allow(self, *places: Path) -> Config:
        return Config(policy=PolicyConfig(allowed_paths=[str(place) for place in places]))

    def write(self, **keys: Any) -> Path:
        path = self.path / "job.json"
        path.write_text(json.dumps(plain.spec(self.model, self.rows, **keys)))
        return path

    def check(self, config: Config, **keys: Any) -> preflight.Verdict:
        return preflight.check(self.write(**keys), Asked(self.layout, config=config, device=CPU, job_id=7))

    def refusal(self, config: Config, **keys: Any) -> HonedError:
        with pytest.raises(HonedError) as caught:
            self.check(config, **keys)
        return caught.value


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A desk in a directory that everybody can enter; pytest's own directories are closed."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        yield Desk(path)


def test_what_lies_in_the_allowed_paths_is_read_and_written(desk: Desk) -> None:
    verdict = desk.check(desk.allow(desk.srv), output_dir=str(desk.srv / "out"))
    assert verdict.output_dir == desk.srv / "out"
    assert desk.check(desk.allow(desk.srv)).output_dir == desk.layout.job(7).output_dir


def test_each_path_outside_of_them_is_refused_by_its_key(desk: Desk) -> None:
    elsewhere = desk.path / "elsewhere"
    elsewhere.mkdir()
    rows = plain.write_dataset(elsewhere / "rows.jsonl")
    model = plain.write_base_model(elsewhere / "model")
    template = elsewhere / "template.jinja"
    template.write_text("{{ messages }}")
    config = desk.allow(desk.srv)
    refusals = {
        "datasets.0.path": desk.refusal(config, datasets=[{"path": str(rows)}]),
        "eval_datasets.0.path": desk.refusal(config, eval_datasets=[{"path": str(rows)}]),
        "base_model": desk.refusal(config, base_model=str(model)),
        "chat_template": desk.refusal(config, chat_template=str(template)),
        "output_dir": desk.refusal(config, output_dir=str(elsewhere / "out")),
        "adapter": desk.refusal(config, lora=None, adapter=str(elsewhere)),
    }
    for key, refusal in refusals.items():
        assert f": {key}: {elsewhere}" in refusal.message, refusal.message
        assert "is outside the directories that jobs may" in refusal.message
        assert str(desk.srv) in refusal.hint
    assert isinstance(refusals["datasets.0.path"], DatasetError)
    assert isinstance(refusals["base_model"], ModelError)


@pytest.mark.parametrize("way", ["the file", "its directory", "a file in the directory", "dots"])
def test_a_link_or_dots_that_lead_out_are_found(desk: Desk, way: str) -> None:
    secret = desk.path / "secret"
    secret.mkdir()
    plain.write_dataset(secret / "rows.jsonl")
    match way:
        case "the file":
            (desk.srv / "link.jsonl").symlink_to(secret / "rows.jsonl")
            path = desk.srv / "link.jsonl"
        case "its directory":
            (desk.srv / "link").symlink_to(secret)
            path = desk.srv / "link/rows.jsonl"
        case "a file in the directory":
            (desk.srv / "many").mkdir()
            (desk.srv / "many/rows.jsonl").symlink_to(secret / "rows.jsonl")
            path = desk.srv / "many"
        case _:
            path = desk.srv / "../secret/rows.jsonl"
    refusal = desk.refusal(desk.allow(desk.srv), datasets=[{"path": str(path)}])
    said = ("is outside the directories that jobs may read", "paths must be absolute")
    assert any(words in refusal.message for words in said)


def test_an_output_directory_that_is_a_link_out_is_refused(desk: Desk) -> None:
    (desk.path / "secret").mkdir()
    (desk.srv / "out").symlink_to(desk.path / "secret")
    assert "outside" in desk.refusal(desk.allow(desk.srv), output_dir=str(desk.srv / "out")).message


def closed_desk(desk: Desk, config: Config | None = None) -> Policy:
    """Return the policy of a machine on which the workers run as another user."""
    return dataclasses.replace(Policy.of(desk.layout, config or Config(), os.getuid()), workers=WORKERS)


def test_what_the_workers_cannot_read_is_told_with_the_way_out(desk: Desk) -> None:
    policy = closed_desk(desk)
    named = Named("datasets.0.path", desk.rows, DatasetError)
    policy.check_read(named)
    desk.rows.chmod(0o600)
    with pytest.raises(DatasetError, match=r"cannot be read by the user honed-job") as caught:
        policy.check_read(named)
    assert f"setfacl -m u:honed-job:r {desk.rows}" in caught.value.hint
    assert "honectl submit --stage" in caught.value.hint
    desk.rows.chmod(0o644)
    desk.srv.chmod(0o700)
    with pytest.raises(DatasetError, match=rf"{desk.srv} \(mode 0700, .*cannot be entered"):
        policy.check_read(named)


def test_a_command_that_is_told_can_be_copied_whatever_the_path_is_called(desk: Desk) -> None:
    rows = desk.srv / "a b;$(touch x)'.jsonl"
    desk.rows.rename(rows)
    rows.chmod(0o600)
    with pytest.raises(DatasetError) as caught:
        closed_desk(desk).check_read(Named("datasets.0.path", rows, DatasetError))
    command = caught.value.hint.removesuffix("; or honectl submit --stage, which copies it into the spool")
    assert shlex.split(command) == ["setfacl", "-m", "u:honed-job:r", str(rows)]


def test_one_closed_shard_of_a_model_is_found(desk: Desk) -> None:
    policy = closed_desk(desk)
    (desk.model / "model.safetensors").chmod(0o600)
    with pytest.raises(ModelError, match=r"model\.safetensors \(mode 0600, "):
        policy.check_read(Named("base_model", desk.model, ModelError))


def test_homes_are_closed_whatever_their_modes(desk: Desk) -> None:
    policy = closed_desk(desk)
    with pytest.raises(DatasetError, match="is below /home, which honed's services cannot access") as caught:
        policy.check_read(Named("datasets.0.path", Path("/home/anna/rows.jsonl"), DatasetError))
    assert "honectl submit --stage" in caught.value.hint


def test_without_allowed_paths_the_workers_of_another_user_write_nowhere_but_in_their_own_directory(desk: Desk) -> None:
    with pytest.raises(SpecError, match="outside the directories that jobs may write"):
        closed_desk(desk).check_write(desk.srv / "out")
    policy = closed_desk(desk, desk.allow(desk.srv))
    with pytest.raises(SpecError, match="cannot be written by the user honed-job"):
        policy.check_write(desk.srv / "out")
    desk.srv.chmod(0o777)
    policy.check_write(desk.srv / "out")


def test_other_peoples_results_are_nobodys_data(desk: Desk) -> None:
    """honed and the workers could read them; the user who dropped the job could not."""
    theirs = desk.layout.job(3).output_dir
    theirs.mkdir(parents=True)
    rows = plain.write_dataset(theirs / "rows.jsonl")
    desk.layout.job(3).dir.chmod(0o750)
    stranger = Person(54322, frozenset({54322}), "berta")
    policy = dataclasses.replace(closed_desk(desk), dropper=stranger, workers=Person(0, frozenset(), "honed-job"))
    with pytest.raises(DatasetError, match="belongs to honed or to another user"):
        policy.check_read(Named("datasets.0.path", rows, DatasetError))
    desk.layout.job(3).dir.chmod(0o755)
    policy.check_read(Named("datasets.0.path", rows, DatasetError))


def test_what_its_submitter_cannot_read_no_job_reads(desk: Desk) -> None:
    """A path opened to the workers, as the hint says, is open to its owner's jobs, and to nobody else's."""
    berta = Person(54322, frozenset({54322}), "berta")
    policy = dataclasses.replace(closed_desk(desk), dropper=berta)
    closed = desk.srv / "closed"
    closed.mkdir()
    rows = plain.write_dataset(closed / "rows.jsonl")
    closed.chmod(0o750)
    if not access.set_acl(closed, Acl(7, 0, 0, {WORKERS.uid: 5}, {})):
        pytest.skip("no ACLs on this file system")
    (desk.srv / "link.jsonl").symlink_to(rows)
    for path in (rows, desk.srv / "link.jsonl", closed):
        with pytest.raises(DatasetError) as caught:
            policy.check_read(Named("datasets.0.path", path, DatasetError))
        assert caught.value.message.endswith("by the user berta, the submitter of the job")
        assert f"setfacl -m u:berta:rx {closed}" in caught.value.hint
    access.set_acl(closed, Acl(7, 0, 0, {WORKERS.uid: 5, berta.uid: 5}, {}))
    policy.check_read(Named("datasets.0.path", rows, DatasetError))


def test_the_cache_of_models_is_everybodys(desk: Desk) -> None:
    cached = desk.layout.cache_dir / "model"
    cached.mkdir(parents=True)
    desk.layout.cache_dir.chmod(0o750)
    if not access.set_acl(desk.layout.cache_dir, Acl(7, 0, 0, {WORKERS.uid: 5}, {})):
        pytest.skip("no ACLs on this file system")
    berta = Person(54322, frozenset({54322}), "berta")
    dataclasses.replace(closed_desk(desk), dropper=berta).check_read(Named("base_model", cached, ModelError))


# --- submit --stage ---------------------------------------------------------------------------------------------------


def test_staging_copies_what_is_closed_and_names_the_copies(desk: Desk) -> None:
    desk.layout.staged_dir.mkdir(parents=True)
    config = desk.allow(desk.path / "elsewhere")
    staged_file = stage.stage(desk.write(), desk.layout, config)
    assert [key for key, _, _ in staged_file.copies] == ["base_model", "datasets.0.path"]
    verdict = preflight.check(staged_file.spec_path, Asked(desk.layout, config=config, device=CPU))
    assert verdict.plan is not None
    for place in (verdict.plan.model.path, Path(verdict.spec.datasets[0].path)):
        assert place.is_relative_to(desk.layout.staged_dir)
    assert (verdict.plan.model.path / "model.safetensors").read_bytes() == (
        desk.model / "model.safetensors"
    ).read_bytes()


def test_a_job_whose_files_can_be_read_is_dropped_as_it_is(desk: Desk) -> None:
    path = desk.write()
    assert stage.stage(path, desk.layout, Config()) == stage.Staged(path, ())


def test_staging_without_a_place_says_what_to_do(desk: Desk) -> None:
    with pytest.raises(HonedError, match="No such file or directory") as caught:
        stage.stage(desk.write(), desk.layout, desk.allow(desk.path / "elsewhere"))
    assert "honed-submit" in caught.value.hint


def image_rows(desk: Desk, path: Path, *names: str) -> Path:
    """Write rows that name images beside their file, and the images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        image = path.parent / name
        image.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (8, 8)).save(image)
    path.write_text(
        "".join(
            json.dumps({"images": [name], "prompt": "What is on it?", "completion": "Nothing."}) + "\n"
            for name in names
        )
    )
    return path


def test_a_staged_data_set_keeps_finding_its_images(desk: Desk) -> None:
    desk.layout.staged_dir.mkdir(parents=True)
    names = ("images/cat.png", "images/dog.png", "../shared/bird.png")
    rows = image_rows(desk, desk.path / "closed" / "rows" / "rows.jsonl", *names)
    (rows.parent / "images" / "of-another-set.png").write_bytes(b"")
    config = desk.allow(desk.srv)
    datasets = [{"path": str(rows)}]
    staged_file = stage.stage(desk.write(datasets=datasets), desk.layout, config)
    ((key, _, copy),) = staged_file.copies
    assert key == "datasets.0.path"
    assert copy.read_bytes() == rows.read_bytes()
    for name in names:
        assert (copy.parent / name).read_bytes() == (rows.parent / name).read_bytes()
    assert not (copy.parent / "images" / "of-another-set.png").exists()


def test_images_that_are_closed_are_staged_though_their_rows_are_open(desk: Desk) -> None:
    desk.layout.staged_dir.mkdir(parents=True)
    image_rows(desk, desk.path / "closed" / "made.jsonl", "cat.png")
    rows = image_rows(desk, desk.srv / "open" / "rows.jsonl", "cat.png")
    (desk.srv / "open" / "cat.png").unlink()
    (desk.srv / "open" / "cat.png").symlink_to(desk.path / "closed" / "cat.png")
    staged_file = stage.stage(desk.write(datasets=[{"path": str(rows)}]), desk.layout, desk.allow(desk.srv))
    ((_, _, copy),) = staged_file.copies
    assert (copy.parent / "cat.png").is_file()
    assert not (copy.parent / "cat.png").is_symlink()


def test_images_named_by_a_closed_absolute_path_cannot_be_staged_and_leave_nothing_behind(desk: Desk) -> None:
    desk.layout.staged_dir.mkdir(parents=True)
    image_rows(desk, desk.path / "closed" / "made.jsonl", "cat.png")
    rows = desk.srv / "absolute.jsonl"
    row = {"images": [str(desk.path / "closed" / "cat.png")], "prompt": "What?", "completion": "Nothing."}
    rows.write_text(json.dumps(row) + "\n")
    with pytest.raises(DatasetError, match=r"row 1: .* is not accessible to honed") as caught:
        stage.stage(desk.write(datasets=[{"path": str(rows)}]), desk.layout, desk.allow(desk.srv))
    assert "relative" in caught.value.hint
    assert list(desk.layout.staged_dir.iterdir()) == []


def test_the_places_of_a_jobs_copies_are_its_droppers_own_and_no_others(desk: Desk) -> None:
    desk.layout.staged_dir.mkdir(parents=True)
    staged_file = stage.stage(desk.write(), desk.layout, desk.allow(desk.path / "elsewhere"))
    place = staged_file.spec_path.parent
    (desk.layout.staged_dir / "other").mkdir()
    (desk.layout.staged_dir / ("0" * 16)).symlink_to(desk.srv)
    job_spec = json.loads(staged_file.spec_path.read_text()) | {
        "a": str(desk.layout.staged_dir),
        "b": [str(desk.layout.staged_dir / "other")],
        "c": str(desk.layout.staged_dir / ("0" * 16) / "x"),
        "d": f"{place}/../../jobs",
    }
    assert staging.places(job_spec, desk.layout, os.getuid()) == [place]
    assert staging.places(job_spec, desk.layout, os.getuid() + 1) == []


# --- What the worker may read -----------------------------------------------------------------------------------------


def test_a_link_in_a_split_leads_nowhere_else(desk: Desk) -> None:
    elsewhere = plain.write_dataset(desk.path / "rows-of-others.jsonl")
    (desk.srv / "data" / "train").mkdir(parents=True)
    (desk.srv / "data" / "train" / "rows.jsonl").symlink_to(elsewhere)
    refused = desk.refusal(desk.allow(desk.srv), datasets=[{"path": str(desk.srv / "data"), "split": "train"}])
    assert refused.code == "dataset_invalid"
    assert f"(really {elsewhere}) is outside the directories that jobs may read" in refused.message


def test_a_link_among_thousands_of_files_leads_nowhere_else(desk: Desk) -> None:
    secret = desk.path / "template.jinja"
    secret.write_text("{{ messages }}")
    for number in range(2100):
        (desk.model / f"{number}.txt").touch()
    (desk.model / "chat_template.jinja").unlink(missing_ok=True)
    (desk.model / "chat_template.jinja").symlink_to(secret)
    refused = desk.refusal(desk.allow(desk.srv))
    assert f"(really {secret})" in refused.message


def test_what_was_checked_and_leads_elsewhere_since_is_not_read(desk: Desk) -> None:
    """The worker checks the grant with its own user, who can read the directories of all jobs."""
    mine, theirs = desk.layout.job(3), desk.layout.job(4)
    for files in (mine, theirs):
        plain.write_dataset(files.dir / "rows.jsonl") if files.dir.mkdir() is None else None
    policy = dataclasses.replace(closed_desk(desk), workers=WORKERS)
    granted = Grant.from_dict(
        policy.grant([Named("datasets.0.path", desk.rows), Named("b", mine.dir / "rows.jsonl")]).as_dict()
    )
    check_granted(granted, Named("datasets.0.path", desk.rows))
    check_granted(granted, Named("a row", mine.dir / "media" / "cat.png"))
    check_granted(granted, Named("a row", theirs.dir / "media" / "cat.png"), theirs.dir)  # the job's own
    with pytest.raises(SpecError, match="belongs to honed or to another user"):
        check_granted(granted, Named("a row", theirs.dir / "media" / "cat.png"))
    desk.rows.unlink()
    desk.rows.symlink_to(theirs.dir / "rows.jsonl")
    with pytest.raises(SpecError, match="belongs to honed or to another user"):
        check_granted(granted, Named("datasets.0.path", desk.rows))


def test_rows_beyond_the_first_are_held_against_the_allowed_paths_too(desk: Desk) -> None:
    config = desk.allow(desk.srv)
    granted = Policy.of(desk.layout, config, os.getuid()).grant([Named("datasets.0.path", desk.rows)])
    check_granted(granted, Named("a row", desk.srv / "cat.png"))
    with pytest.raises(DatasetError, match="outside the directories that jobs may read"):
        check_granted(granted, Named("a row", desk.path / "cat.png", DatasetError))
