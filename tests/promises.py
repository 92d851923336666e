"""What honed promises of each family of models, tried on tiny ones through the real worker:
`python promises.py '{"families": {FAMILY: [PROMISE, …]}}'` writes a line of JSON for each.

    resumed    full fine-tuning that is killed and resumed gives the weights and losses of the undisturbed run
    best       load_best_model_at_end gives the weights of a run that ended at the best step
    divided    batches of 4×1, 2×2 and 1×4 rows of unequal length have the same gradient
    merged     the merged model has the logits of the adapter on its base, as PEFT computes them in a clean process
    exported   a clean process that opens what full fine-tuning wrote finds each tensor, and has the live model's logits
    bfloat16   the same for weights that are stored in bfloat16, beside transformers' own cast of the live model
    adapted    the same for an adapter on its base

The libraries are imported once: a family's jobs are forks, and so are the models that reader.py opens.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file

from honed.system.error import HonedError
from honed.worker.stop import Stop
from waiting import wait_for
from worker.conftest import Ended, WorkerJob, plan_job, read_events
from zoo import families

HOLDS = "holds"
#: Largest difference of two logits in float32, whose kernels may sum in another order.
MAX_DIFFERENCE = 1e-5
#: Largest difference of a merge in memory, by PEFT, from the adapter: sums that are rounded in another order.
MAX_ROUNDING = 1e-3
#: The same in bfloat16, in units of the last place.
MAX_ULPS = 2
#: Largest difference of two gradients, as a share of a tensor's largest element and of all tensors' largest one.
MAX_GRADIENT_SHARES = (1e-3, 1e-5)
#: The first of them where the loss has a balancing term: of a batch it is not the mean of its rows'.
MAX_BALANCED_SHARE = 0.02
STEPS = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
SAVED = STEPS | {"save_strategy": "steps", "save_steps": 2}
#: Each weight after a step differs from the one before it by its gradient.
PLAIN_STEP = {
    "max_steps": 1,
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
}
DIVISIONS = ((4, 1), (2, 2), (1, 4))
TIMEOUT_SEC = 300.0


class BrokenPromiseError(Exception):
    """A promise was not kept, or the family was refused; the message is the table's entry."""


class Watching(Stop):
    """A stop request that is never set: it looks at the run from the worker's own checks."""

    def __init__(
        self,
        job: WorkerJob,
        *,
        kill_after: int | None = None,
        logits_path: Path | None = None,
        live_dir: Path | None = None,
    ) -> None:
        """`kill_after`: kill the process once the checkpoint of this step is there and a later step is done.
        `logits_path`, `live_dir`: for the logits of the trained model before its export, and for the model as
        transformers alone saves it.
        """
        super().__init__()
        self.job = job
        self.kill_after = kill_after
        self.logits_path = logits_path
        self.live_dir = live_dir
        if kill_after is not None:
            self.beat = self._kill

    def check(self) -> None:
        super().check()
        frame = sys._getframe(1)
        if frame.f_locals.get("name") != "export" or frame.f_back is None:
            return
        if (trainer := frame.f_back.f_locals.get("trainer")) is not None:  # a merge has none
            model = trainer.model
            if self.logits_path is not None:
                torch.save(live_logits(model), self.logits_path)
            if self.live_dir is not None:
                model.save_pretrained(self.live_dir)

    def _kill(self) -> None:
        steps = [each.data["step"] for each in read_events(self.job.events_path(1)) if each.kind == "step"]
        assert self.kill_after is not None
        if steps and steps[-1] > self.kill_after:
            there = self.job.dir / f"checkpoints/checkpoint-{self.kill_after}/MANIFEST.json"
            wait_for(there.exists, TIMEOUT_SEC, what=str(there))
            os.kill(os.getpid(), signal.SIGKILL)


def live_logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(probe_ids()), use_cache=False).logits
    model.train()
    return logits


def probe_ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(5, 390, (2, 32), generator=generator).tolist()


class Reader:
    """The clean process that opens models; see reader.py."""

    def __init__(self) -> None:
        # Without `site`, whose .pth files of an environment with honed import some of it.
        environment = os.environ | {"PYTHONPATH": str(Path(torch.__file__).parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("reader.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout

    def open(
        self,
        model: Path,
        *,
        sees: bool,
        adapter: Path | None = None,
        merged: bool = False,
        dtype: str = "float32",
        attention: str,
        base: bool = False,
    ) -> torch.Tensor:
        """Return the logits of a model as a user opens it. Raises BrokenPromiseError for missing tensors."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "logits.pt")
            asked = {
                "model": str(model),
                "adapter": str(adapter or ""),
                "merged": merged,
                "sees": sees,
                "dtype": dtype,
                "attention": attention,
                "ids": probe_ids(),
                "logits": str(path),
            }
            self._asks.write(json.dumps(asked) + "\n")
            self._asks.flush()
            found = json.loads(self._answers.readline())
            if found["error"]:
                raise BrokenPromiseError(f"cannot be opened: {first_line(found['error'])}")
            for kind in ("missing", "unexpected", "mismatched"):
                if found[kind] and not base:
                    raise BrokenPromiseError(f"{len(found[kind])} {kind} tensors: {found[kind][0]}")
            return torch.load(path)

    def end(self) -> None:
        self._asks.close()
        self._process.wait()


class Trial:
    """One family's jobs, in a directory of their own."""

    def __init__(self, family: str, directory: Path, reader: Reader) -> None:
        self.family = family
        self.sees = families.is_vision(family)
        self.directory = directory
        self.reader = reader
        self.base = families.build(directory / "base", family)
        self.rows = families.write_rows(directory / "rows.jsonl", 8)
        self.num_jobs = 0
        self.undisturbed: tuple[WorkerJob, Ended] | None = None
        self.adapter: WorkerJob | BrokenPromiseError | None = None
        self.balance = ""  #: how exact a divided batch is
        self.excluded = [*families.EXCLUDED.get(family, ())]  #: linear layers that take no adapter

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def job(self, *, rows: Path | None = None, **keys: Any) -> WorkerJob:
        """Plan a job. Raises BrokenPromiseError if it is refused."""
        self.num_jobs += 1
        directory = self.directory / f"job{self.num_jobs}"
        directory.mkdir()
        document: dict[str, Any] = {
            "base_model": str(self.base),
            "datasets": [{"path": str(rows or self.rows)}],
            "backend": "transformers",
            "dtype": "float32",
            "predictions": {"sample_frequency": "off"},
        }
        if "training" in keys:
            keys["training"] = keys["training"] | families.REMEDIES.get(self.family, ({}, ""))[0]
        if keys.get("kind") == "merge":
            document = {"base_model": str(self.base), "dtype": "float32"}
        try:
            return plan_job(directory, document | keys)
        except HonedError as error:
            raise BrokenPromiseError(f"refused: {error.code}: {first_line(error.message)}") from error

    def run(self, job: WorkerJob, attempt: int = 1, **watching: Any) -> Ended:
        """Run an attempt in a fork. Raises BrokenPromiseError if it ends otherwise than asked."""
        if (pid := os.fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = work(job, attempt, Watching(job, **watching))
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended = job._ended(status, attempt)
        if status != (0 if watching.get("kill_after") is None else -signal.SIGKILL):
            code = (ended.result.get("error") or {}).get("code", status)
            self.check_refusal(job, f"{code}: {told(job, ended, attempt)}")
        return ended

    def check_refusal(self, job: WorkerJob, failure: str) -> None:
        """Raise BrokenPromiseError for a job that has failed, or that honed refuses by a step on a small model."""
        from honed.worker import rehearsal

        place = self.directory / f"rehearsal{self.num_jobs}"
        place.mkdir(exist_ok=True)
        answer = rehearsal.rehearse(rehearsal._assignment(job.plan["spec"], job.plan, place))
        if answer.outcome == "refused" and answer.error is not None:
            failure = f"refused: {answer.error.code}: {first_line(answer.error.message).replace(str(self.base), '')}"
        raise BrokenPromiseError(failure)

    def done(self, job: WorkerJob, **watching: Any) -> dict[str, torch.Tensor]:
        """Run a job, and return the weights of its output."""
        self.run(job, **watching)
        return tensors(job.output_dir)

    # -- promises -----------------------------------------------------------------------------------------------------

    def resumed(self) -> None:
        whole, undisturbed = self.whole()
        killed = self.job(training=SAVED)
        self.run(killed, kill_after=2)
        second = self.run(killed, 2)
        if [each["step"] for each in second.of("resumed")] != [2]:
            raise BrokenPromiseError("it began again")
        check_equal(tensors(killed.output_dir), tensors(whole.output_dir))
        later = {step: loss for step, loss in undisturbed.losses.items() if step > 2}
        if second.losses != later:
            raise BrokenPromiseError(f"losses {second.losses} instead of {later}")

    def best(self) -> None:
        for rate in (2e-2, 0.3, 1.0):  # until the last step is not the best
            job, step = self.evaluated(rate)
            if step < STEPS["max_steps"]:
                short = self.job(training=STEPS | {"learning_rate": rate, "max_steps": step})
                check_equal(tensors(job.output_dir), self.done(short))
                return
        raise BrokenPromiseError("inconclusive: the last step was the best")

    def evaluated(self, rate: float) -> tuple[WorkerJob, int]:
        """Run a job that is evaluated at each step on rows of other words. Return the best step, too."""
        other = self.directory / "other.jsonl"
        words = "never before seen words with quite another kind of letters, %s" % ("xyz " * 9)
        row = {"messages": [{"role": "user", "content": "Say?"}, {"role": "assistant", "content": words}]}
        other.write_text((json.dumps(row) + "\n") * 2)
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        training = STEPS | evaluated | {"load_best_model_at_end": True, "learning_rate": rate}
        job = self.job(training=training, eval_datasets=[{"path": str(other)}])
        ended = self.run(job)
        losses = {each["step"]: each["metrics"]["eval_loss"] for each in ended.of("evaluation") if each["step"]}
        return job, min(losses, key=lambda each: losses[each])

    def divided(self) -> None:
        rows = families.write_rows(self.directory / "four.jsonl", 4)
        before = tensors(self.base)
        gradients = []
        for size, accumulation in DIVISIONS:
            sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
            job = self.job(rows=rows, training=PLAIN_STEP | sizes)
            ended = self.run(job)
            after = tensors(job.output_dir)
            gradients.append({name: before[name] - after[name] for name in before if name in after})
        whole, *others = gradients
        largest = max(float(each.abs().max()) for each in whole.values())
        if largest == 0:
            raise BrokenPromiseError("nothing was trained")
        of_tensor, of_all = MAX_GRADIENT_SHARES
        if any("aux_loss" in each for each in ended.of("step")):
            of_tensor = MAX_BALANCED_SHARE
            self.balance = f"within {of_tensor:.0%}, as a balancing loss is of the tokens of each forward pass"
        for (size, accumulation), other in zip(DIVISIONS[1:], others, strict=True):
            wrong = {
                name: float((other[name] - each).abs().max() / each.abs().max().clamp(min=1e-12))
                for name, each in whole.items()
                if (other[name] - each).abs().max() > of_tensor * each.abs().max() + of_all * largest
            }
            if wrong:
                name = max(wrong, key=lambda each: wrong[each])
                raise BrokenPromiseError(
                    f"{size}×{accumulation} differs from 4×1 in {len(wrong)} of {len(whole)} gradients, in {name} by "
                    f"{wrong[name]:.1%}"
                )

    def merged(self) -> None:
        job = self.adapter_job()
        adapted = self.open(job, adapter=True)
        theirs = self.open(job, adapter=True, merged=True)
        merging = self.job(kind="merge", adapter=str(job.output_dir))
        self.run(merging)
        rounding = min(float((theirs - adapted).abs().max()), MAX_ROUNDING)
        check_close(self.open(merging, like=job), adapted, rounding=rounding)

    def exported(self) -> None:
        job, _ = self.whole()
        found, live = self.open(job), torch.load(self.directory / "live.pt")
        if self.family in families.ZEROED:
            for logits in (found, live):
                logits[..., families.PAD] = 0
        check_close(found, live)

    def bfloat16(self) -> None:
        base = families.build(self.directory / "base16", self.family, dtype="bfloat16")
        live = self.directory / "live16"
        job = self.job(base_model=str(base), dtype="auto", training=STEPS | {"max_steps": 2})
        self.run(job, live_dir=live)
        cast = self.reader.open(live, sees=self.sees, dtype="bfloat16", attention=attention_of(job))
        check_close(self.open(job, dtype="auto"), cast)

    def adapted(self) -> None:
        job = self.adapter_job()
        check_close(self.open(job, adapter=True), torch.load(self.directory / "adapted.pt"))

    def whole(self) -> tuple[WorkerJob, Ended]:
        """Return the undisturbed full fine-tuning, which is run once."""
        if self.undisturbed is None:
            job = self.job(training=SAVED)
            self.undisturbed = job, self.run(job, logits_path=self.directory / "live.pt")
        return self.undisturbed

    def open(self, job: WorkerJob, *, adapter: bool = False, like: WorkerJob | None = None, **how: Any) -> torch.Tensor:
        """Return the logits of a job's output as a clean process opens it, with the attention that was trained."""
        place = {"model": self.base, "adapter": job.output_dir, "base": True} if adapter else {"model": job.output_dir}
        return self.reader.open(**place, sees=self.sees, attention=attention_of(like or job), **how)

    def adapter_job(self) -> WorkerJob:
        """Return the job of an adapter on all linear layers that PEFT accepts, which is trained once."""
        if self.adapter is None:
            try:
                self.adapter = self.train_adapter()
            except BrokenPromiseError as refused:
                self.adapter = refused
                if found := re.search(r"Incompatible modules: [{\[]([^}\]]*)[}\]]", str(refused)):
                    self.excluded = sorted(re.findall(r"'([^']*)'", found[1]))
                    self.adapter = self.train_adapter()
        if isinstance(self.adapter, BrokenPromiseError):
            raise self.adapter
        return self.adapter

    def train_adapter(self) -> WorkerJob:
        lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
        lora |= {"exclude_modules": self.excluded} if self.excluded else {}
        job = self.job(lora=lora, training=STEPS | {"learning_rate": 2e-2})
        self.run(job, logits_path=self.directory / "adapted.pt")
        return job

    def remarks(self, promise: str) -> list[str]:
        """Return with which exceptions a promise holds."""
        found = [self.balance] if promise == "divided" and self.balance else []
        if self.family in families.REMEDIES:
            found.append(families.REMEDIES[self.family][1])
        if promise == "exported" and self.family in families.ZEROED:
            found.append("but for the logit of the padding token, whose row transformers sets to zero at each load")
        if self.excluded and promise in ("merged", "adapted"):
            found.append(f"without {' and '.join(self.excluded)}, which take no adapter")
        return found


def attention_of(job: WorkerJob) -> str:
    return str(job.plan["precision"]["attn_implementation"])


def work(job: WorkerJob, attempt: int, stop: Watching) -> int:
    from honed.worker.run import run

    log_path = job.dir / f"attempts/{attempt}/worker.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job.dir)
    return run(job.dir, attempt, stop=stop)


def told(job: WorkerJob, ended: Ended, attempt: int) -> str:
    """Return why a run has ended, with what is said to the job's owner alone."""
    return first_line((ended.messages("error") or [job.log(attempt)[-300:]])[-1])


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(directory.glob("*.safetensors")) for name, each in load_file(path).items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    if found.keys() != expected.keys():
        raise BrokenPromiseError(f"other tensors: {sorted(found.keys() ^ expected.keys())[:3]}")
    wrong = [name for name, each in expected.items() if not torch.equal(found[name], each)]
    if wrong:
        raise BrokenPromiseError(f"{len(wrong)} of {len(expected)} tensors differ: {wrong[0]}")


def check_close(found: torch.Tensor, expected: torch.Tensor, *, rounding: float = 0.0) -> None:
    """Raise BrokenPromiseError unless the logits are equal but for their dtype's rounding, or twice that given."""
    if found.dtype != expected.dtype:
        raise BrokenPromiseError(f"it opens in {found.dtype}, and was computed in {expected.dtype}")
    if not bool(expected.isfinite().all()):
        raise BrokenPromiseError("the logits are not finite")
    difference = (found.float() - expected.float()).abs()
    if found.dtype == torch.bfloat16:
        ulps = difference / torch.exp2(expected.float().abs().clamp(min=2**-10).log2().floor() - 7)
        if float(ulps.max()) > MAX_ULPS:
            raise BrokenPromiseError(f"logits differ by {float(ulps.max()):.0f} units in the last place")
    elif float(difference.max()) > max(MAX_DIFFERENCE, 2 * rounding):
        raise BrokenPromiseError(f"logits differ by {float(difference.max()):.2g}")


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def try_family(family: str, reader: Reader, promises: Sequence[str]) -> dict[str, str]:
    """Return promise → `holds`, or how it is broken."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=f"honed-{family}-") as directory:
        trial = Trial(family, Path(directory), reader)
        for promise in promises:
            try:
                getattr(trial, promise)()
                found[promise] = ", ".join([HOLDS, *trial.remarks(promise)])
            except BrokenPromiseError as broken:
                found[promise] = str(broken).replace(directory, "")
    return found


def of_each(asked: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield each family, its results, and the seconds that they took. `asked`: family → promises."""
    import_libraries()
    reader = Reader()
    try:
        for name, promises in asked.items():
            began = time.monotonic()
            read_fd, write_fd = os.pipe()
            if (pid := os.fork()) == 0:
                try:
                    found = try_family(name, reader, promises)
                except Exception as error:  # noqa: BLE001 - a fork must not go on as its parent
                    found = dict.fromkeys(promises, f"{type(error).__name__}: {first_line(str(error))}")
                os.write(write_fd, json.dumps(found).encode())
                os._exit(0)
            os.close(write_fd)
            with os.fdopen(read_fd) as answer:
                text = answer.read()
            os.waitpid(pid, 0)
            yield name, json.loads(text or "{}"), time.monotonic() - began
    finally:
        reader.end()


def import_libraries() -> None:
    from honed.worker.__main__ import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from honed.worker.model import load, torchvision

    torchvision.mend()
    load.choose("transformers").import_libraries()
    import transformers

    import honed.worker.model.export
    import honed.worker.rows.data
    import honed.worker.train.callback
    import honed.worker.train.losscheck
    import honed.worker.train.trainer
    import honed.worker.train.usage  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for name, found, seconds in of_each(json.loads(sys.argv[1])["families"]):
        answers.write(json.dumps({"family": name, "promises": found, "seconds": seconds}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
