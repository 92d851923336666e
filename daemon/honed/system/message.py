"""The kinds of journal entries that have an explanation: a MESSAGE_ID each, and the text that `journalctl -x` shows.

`units/honed.catalog` is generated from this table (`python -m honed.cli.reference --write docs`). An id is never
changed or reused: people filter by it. `@FIELD@` in a text is replaced by that field of the entry.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from honed.system.error import BY_CODE


@dataclass(frozen=True)
class Message:
    """One kind of entry: what happened, why, and what to do."""

    id: str
    subject: str
    text: str
    documentation: str = "man:honed(8)"


# -- the daemon -------------------------------------------------------------------------------------------------------

READY = Message(
    "ef8265c427fe4b889acb1bd57657add4",
    "honed is ready",
    """
    The spool is recovered and watched, and the jobs that were running are followed again. Drop job files into
    /var/spool/honed/incoming, or hand them over with

      honectl submit FILE
    """,
)
STOPPING = Message(
    "1119b5db587b418db294a06b5f41b72e",
    "honed stops",
    """
    honed was asked to stop. What becomes of running jobs is said by jobs.on_stop in /etc/honed/honed.toml: they go on
    in their own units, or write a checkpoint and go back to the queue. Nothing that was accepted is lost.

      systemctl list-units 'honed-job@*'
    """,
)
RELOADED = Message(
    "e573b743ea4145e48f2b70f496a435b2",
    "The configuration was reloaded",
    """
    /etc/honed/honed.toml and honed.toml.d/*.toml were read again and are in force. Running jobs were not touched.
    """,
    "man:honed.toml(5)",
)
CONFIG_REFUSED = Message(
    "4dc75a62dd18438ebc00d93882c1a5ec",
    "The new configuration is wrong, and the old one stays in force",
    """
    A reload found a fault in /etc/honed/honed.toml or honed.toml.d/*.toml; the message names the file and the key.
    honed goes on with what it had, and `systemctl status honed` says so until a reload succeeds.

    Correct the file, then

      systemctl reload honed
    """,
    "man:honed.toml(5)",
)
DEGRADED = Message(
    "87bae90fda104d74a2bc684f8b8a3761",
    "honed cannot work as it is: the machine has to be mended",
    """
    The disk is full, a file system is read-only, or a file or directory of honed's cannot be written. A restart would
    not help, so there is none: honed keeps trying, says in `systemctl status honed` what is wrong, and goes on by
    itself once it is mended. Running jobs are not touched. Accepted jobs are safe.

      df -h /var/spool/honed /var/lib/honed
      honectl doctor
    """,
)
RECOVERED = Message(
    "9a3b3a943e354eec8cccfcfb513115ba",
    "honed works again",
    """
    What kept honed from working is mended, and it goes on where it was.
    """,
)
DATABASE_DAMAGED = Message(
    "184c3226c40a48638d15308a34a35c8a",
    "honed's database was damaged, and is made again",
    """
    /var/lib/honed/honed.db could not be read. It was set aside as honed.db.damaged and made again from the jobs'
    entries and event files, which are the truth; nothing is lost but what other tools had added to it.

    A database does not damage itself: look at the disk.

      journalctl -k -p err
    """,
)
ENTRY_DAMAGED = Message(
    "78644fdf6a4644638d81fb52131ef2c1",
    "An entry of the spool is damaged",
    """
    The file named in the message is a job's entry, and is none that can be read. That job is passed over; the others
    go on. Its directory below /var/lib/honed/jobs is whole.

    Restore the entry from a backup, or move it away and drop the job again: its spec lies in its directory.
    """,
)

# -- the life of a job ------------------------------------------------------------------------------------------------

ACCEPTED = Message(
    "3a7874d9496e44d9b3228ebcce15ac74",
    "Job @HONED_JOB@ was accepted",
    """
    The file @HONED_FILE@ passed every check that can be made before a model is loaded, and is job @HONED_JOB@
    (@HONED_NAME@) from now on. It is accepted once, and will not be lost. Follow it with

      journalctl -f HONED_JOB=@HONED_JOB@
      honectl show @HONED_JOB@
    """,
    "man:honectl(1)",
)
STARTED = Message(
    "fbf91b37745a4d06a26e6a7da65e37de",
    "Job @HONED_JOB@ starts",
    """
    An attempt of job @HONED_JOB@ (@HONED_NAME@) starts in its own process, from its last whole checkpoint if it has
    one.

      systemctl status honed-job@@HONED_JOB@
      honectl watch @HONED_JOB@
    """,
    "man:honectl(1)",
)
CHECKPOINT = Message(
    "84d7743de16343a8aa29122dd237f2eb",
    "Job @HONED_JOB@ wrote a checkpoint",
    """
    Everything up to step @HONED_STEP@ is kept: whatever happens now, the job goes on from there.
    """,
    "man:honectl(1)",
)
FALLBACK = Message(
    "4349bef3871a417f8f748db8ca4db578",
    "Job @HONED_JOB@ goes on without Unsloth",
    """
    Unsloth turned out not to be able to train this model on this machine, or not in the planned precision; the
    message says why. The same attempt goes on in a fresh process with transformers, into which Unsloth is never
    imported. No attempt is used up.

    Write `backend: transformers` into the job file to spare the try, or `backend: unsloth` to have it fail instead.
    """,
    "man:honed-job(5)",
)
ADJUSTED = Message(
    "8bd9c149bac3413f8467c5b687c9ad0b",
    "Job @HONED_JOB@ ran out of memory, and goes on with smaller batches",
    """
    An attempt of job @HONED_JOB@ (@HONED_NAME@) ran out of memory. The next one goes on from its last checkpoint and
    takes one step down a ladder; the message says which. What is learned stays the same: a batch is divided and its
    parts are accumulated. It is slower, and no attempt of retry.max_attempts is used up. The steps taken stand in

      honectl show @HONED_JOB@

    To spare the attempts, write the last of them into the job file. `retry: {on_out_of_memory: fail}` takes no step.
    """,
    "man:honectl(1)",
)
WAITS_FOR_ROOM = Message(
    "93750124ec124e88a0977beb50fb0fd2",
    "Job @HONED_JOB@ waits for free disk space",
    """
    The disk was too full for the next checkpoint of job @HONED_JOB@ (@HONED_NAME@), older ones had been given up
    already, and the job stopped. It is queued, goes on by itself from its last checkpoint once there is enough room,
    and uses up no attempt.

      df -h /var/lib/honed
      honectl show @HONED_JOB@
    """,
    "man:honectl(1)",
)
SUCCEEDED = Message(
    "73d48b0f3317449b8a3eb9c6998b7332",
    "Job @HONED_JOB@ succeeded",
    """
    Job @HONED_JOB@ (@HONED_NAME@) is done, and its result is written. Where it lies, its figures and what the model
    answered on the way:

      honectl show @HONED_JOB@
      honectl predictions @HONED_JOB@
    """,
    "man:honectl(1)",
)
CANCELLED = Message(
    "c759fd8f6ce44f0f9d252c265942999c",
    "Job @HONED_JOB@ was cancelled",
    """
    Its owner or an administrator ended it. Its checkpoints are kept; to go on from them:

      honectl requeue @HONED_JOB@
    """,
    "man:honectl(1)",
)
HELD = Message(
    "30b36169d2354a00bd058db653dbbb36",
    "Job @HONED_JOB@ waits for a person",
    """
    It was put on hold, or stopped behind honed's back (`systemctl stop honed-job@@HONED_JOB@`), or a job that it
    depends on did not succeed; the message says which. It has its last checkpoint, and goes on from there when it is
    let go:

      honectl release @HONED_JOB@
    """,
    "man:honectl(1)",
)

# -- what goes wrong: one for each code of an error -------------------------------------------------------------------

#: Explanations of all error codes, whether they rejected a job file (HONED_STATE=rejected) or ended an attempt.
BY_ERROR: dict[str, Message] = {
    "spec_invalid": Message(
        "d0af395785874ddeb04faeec6a2c0aa4",
        "The job file is not a job",
        """
        The message names the key and its line: unknown keys have the nearest known one beside them. Nothing was
        started. A refused file lies in /var/spool/honed/rejected as it was dropped, and beside it FILE.reason, which
        says the same.

        Correct the file and drop it again. To see every fault before:

          honectl check FILE
        """,
        "man:honed-job(5)",
    ),
    "dataset_invalid": Message(
        "24a60176db434f8399cf5898d64c4c56",
        "A data set is missing, cannot be read, or has no row to train on",
        """
        The message names the file and the row. A file that is there and cannot be read is one that the job's submitter
        may not read; home directories are closed to honed's services.

          honectl check FILE            what is wrong, with the row
          honectl preview FILE          rows as they would be trained on
          honectl submit --stage FILE   copies what honed may not read into the spool
        """,
        "man:honed-job(5)",
    ),
    "model_invalid": Message(
        "6f804e657f364761b0ea25709a1be694",
        "The base model's files are incomplete, or cannot be used",
        """
        A file is missing, cut short, of another model, in a form that is not loaded here, or not readable for
        the job's submitter. The message names it. Copy or fetch the model again, or name another; a hub id that is
        not in the cache is fetched only where policy.hub allows that.
        """,
        "man:honed-job(5)",
    ),
    "precision_mismatch": Message(
        "14bfde8a94304347b84fee2b67d6f82b",
        "The model that was loaded is not what was planned",
        """
        After loading, every parameter is counted by role and dtype and held against the plan. What differs is named
        in the message; it could not be mended without changing the model. No step was trained on it, unless the
        message says that weights were cast while it trained: then nothing of that was saved.

          honectl plan FILE   what was planned, with a reason for each choice

        Ask for a dtype, quantization or backend by name in the job file instead of `auto`.
        """,
        "man:honed-job(5)",
    ),
    "mask_invalid": Message(
        "31b10404f6e24275ac8ced0d98706bc7",
        "The job would have trained on the wrong tokens",
        """
        Before the first step, real batches are decoded and compared with the assistant's turns. They differ: the
        message shows what would have been trained on. The cause is nearly always a chat template that does not belong
        to the model or the data.

          honectl preview FILE   masked and trained text told apart

        Name a template that fits as `chat_template:`.
        """,
        "man:honed-job(5)",
    ),
    "loss_mismatch": Message(
        "1b5151d11ddc4a15a9574499c463171d",
        "The loss that would have been trained is not the model's",
        """
        Before the first step the loss is computed on a slice of one row, as it would be trained and from the model's
        own logits. The two differ: a kernel, or a loss that goes in chunks, leaves out what the model does to its
        logits, or the model's code computes its loss otherwise. No step was trained.

        The message has both numbers, and says what helps: training.loss_type: nll, another batch size, or backend:
        transformers.
        """,
        "man:honed-job(5)",
    ),
    "memory_insufficient": Message(
        "3ee3fcd3adeb413ba19cc1fac94984a8",
        "The job cannot fit into the memory of this machine's devices",
        """
        Weights, adapter, gradients, optimizer and activations were estimated from the checkpoint and the job file;
        the message names the parts, and the smallest changes that would make it fit. Typical ones: quantization:
        4bit, a smaller per_device_train_batch_size with more gradient_accumulation_steps, gradient_checkpointing, a
        shorter max_length.

          honectl plan FILE
        """,
        "man:honed-job(5)",
    ),
    "disk_insufficient": Message(
        "443438c1d40743ee93a5fcb2d9494bb9",
        "There is no room for the job's checkpoints or its output",
        """
        The message says what is needed and what is free. Free some, lower training.save_total_limit, or write
        elsewhere with output_dir. A job that found no room for a checkpoint is queued, and goes on by itself.

          df -h /var/lib/honed
          du -sh /var/lib/honed/jobs/*
        """,
    ),
    "backend_unavailable": Message(
        "f71ddfa85a88494a9de6b17249e16eca",
        "The backend that the job names cannot train this model here",
        """
        With `backend: auto` honed goes on with transformers by itself. This job names `backend: unsloth`, which does
        not fall back: the message has Unsloth's own words. Write `backend: auto`, or mend the installation.

          honectl doctor
        """,
        "man:honed-job(5)",
    ),
    "time_limit": Message(
        "3fe1ca692ba0430db5f01a6f1028f8a7",
        "The job's own time limit is over",
        """
        All its attempts together took longer than its time_limit_sec. Its last checkpoint is kept. To give it more
        time, drop it again with a larger one, and name that checkpoint's adapter as `adapter:`.
        """,
        "man:honed-job(5)",
    ),
    "out_of_memory": Message(
        "af187078ace14253aee6769740b0157f",
        "Memory ran out while the job ran",
        """
        The message says which: the GPU's memory (CUDA), the process's own (MemoryError), or the machine's, in which
        case the kernel killed the worker. The job goes on from its last checkpoint with smaller batches, one step at a
        time, which uses up no attempt; where no step is left it fails, and the message says what was tried. Then:

          honectl show ID              estimated and used memory side by side
          journalctl -k -g oom         what the kernel killed, and why
          systemctl status honed-jobs.slice

        Take a smaller per_device_train_batch_size or max_length, or raise MemoryMax= where a drop-in sets it.
        """,
        "man:honed-job(5)",
    ),
    "diverged": Message(
        "270981e1204e405b9f9fe28c8a1caa34",
        "Training has diverged",
        """
        Losses, gradients or weights are no numbers any more, or the gradient exploded: a learning rate that is too
        high, float16 where the model needs bfloat16 (the message says where it is a suspect), or broken rows. The last
        good checkpoint is kept. It is not tried again, for it would diverge again.

          honectl watch ID        the course of the loss
          honectl predictions ID  what the model still answered

        Lower training.learning_rate, add warmup_steps, or set training.max_grad_norm.
        """,
        "man:honed-job(5)",
    ),
    "stalled": Message(
        "e0af951fba68482fae9e801ddbfe3e71",
        "The job made no progress, and was ended",
        """
        No step, evaluation or other sign of life came within the time allowed. Every thread's Python stack was
        written to the job's journal and its worker.log before it was ended; read them first. A dead network file
        system, a deadlocked data loader or a GPU that fell off the bus are the usual causes.

          journalctl -u honed-job@@HONED_JOB@
          journalctl -k -p err

        It is tried again from its last checkpoint as long as it has attempts left. The time allowed is learned from the
        job's own steps, between jobs.min_stall_timeout_sec and jobs.stall_timeout_sec.
        """,
    ),
    "regressed": Message(
        "6423d527204f43bf92fc51381083f032",
        "The model ended worse than it began",
        """
        The job's own guard says so: its metric fell by more than was allowed between the baseline and the end. The
        result is not called a success. It is kept beside the place of the output, as OUTPUT_DIR.regressed.

          honectl predictions ID  answers before and after, beside the truth
        """,
        "man:honed-job(5)",
    ),
    "interrupted": Message(
        "39f45bc572bd488b9b73533540ba5818",
        "The job was stopped, with a checkpoint",
        """
        It was asked to stop and wrote a checkpoint first; that uses up no attempt. Where honed or the machine went
        down, it goes on by itself. Where a person stopped it, a person lets it go on:

          honectl release @HONED_JOB@
        """,
        "man:honectl(1)",
    ),
    "killed": Message(
        "d28b1d4f69084e50921f2e91dce8e281",
        "The worker died without a word",
        """
        A signal ended it, or it exited without its result. It is tried again from its last checkpoint as long as it
        has attempts left; a job that keeps killing its worker is parked as failed.

          honectl logs --raw @HONED_JOB@    what it printed last
          journalctl -k -p warning

        A SIGSEGV comes from a compiled library (honectl doctor); a SIGKILL from a person, or from the kernel's or
        another out-of-memory killer.
        """,
    ),
    "environment_invalid": Message(
        "21b351d0277d47d79d2fcab1eea24aac",
        "This machine or its installation cannot run the job",
        """
        A package is missing or does not fit the others, a permission is lacking, or a device does not answer. The
        message says which, and no change of the job file mends it.

          honectl doctor
        """,
    ),
    "error": Message(
        "1309030d35e449caa2442b3c1f6c8c59",
        "Something failed in a way that nobody foresaw",
        """
        An exception of honed's or of a library. Its traceback is in the job's own output:

          honectl logs --raw ID

        honed and its other jobs go on.
        """,
    ),
    "not_permitted": Message(
        "dbad8421069948a49b43daaa4f2aac6d",
        "Somebody asked for what is another user's",
        """
        A job is read and changed by who dropped it, by root and by the members of policy.admin_group. Who asks is known
        from the control socket, and who dropped a job from its file.
        """,
        "man:honed.toml(5)",
    ),
    "usage": Message(
        "5b58aff6b6e44d97b47234122bdfbaa4",
        "A command was given words that it does not take",
        """
        See honectl(1).
        """,
        "man:honectl(1)",
    ),
}  # fmt: skip

SEND_TROUBLE = Message(
    "e0667d14dedd4c4abfba1687512da374",
    "Metrics and predictions cannot be delivered",
    """
    The metrics API did not take them: it cannot be reached, is busy, or says that address or token are wrong (401, 403,
    404). They wait in /var/lib/honed/outbox and are tried again, without end. No job is held up, and all of them are
    in honed.db in any case.

    Where the token is wrong, put a new one into reporting.token_file or /etc/credstore/honed.metrics-token; the file is
    read anew at each try, a credential with

      systemctl restart honed-send
    """,
    "man:honed.toml(5)",
)
ROW_REFUSED = Message(
    "2a9bb934a52d406f910f0bcb28322fcc",
    "The metrics API refused a row, which is set aside",
    """
    It answered this row alone with the status in the message, which means that it will never take it as it is. The row
    lies in /var/lib/honed/outbox/sender/refused with the answer; the rows after it go on. Once the other side has been
    mended:

      systemctl reload honed-send
    """,
    "man:honed.toml(5)",
)
ROWS_LOST = Message(
    "1e838fd06ace4535b06f7c710166d926",
    "Metrics and predictions found no room in the outbox",
    """
    More of them wait for delivery than reporting.max_outbox_bytes allows, or the disk is full. The newest are not sent,
    ever; honed.db has them. Their number is in /var/lib/honed/outbox/lost.json.

      systemctl status honed-send
    """,
    "man:honed.toml(5)",
)

NOTICE_TROUBLE = Message(
    "ee862292747b48beb5a43e1605b63291",
    "A notice of a job's end cannot be delivered",
    """
    Its receiver, a webhook or a mail server, cannot be reached, is busy, or says that address, token or password are
    wrong. It waits in /var/lib/honed/outbox/notices and is tried again, ever later, for notify.give_up_days. No job and
    no other receiver is held up.

      journalctl -u honed-send
    """,
    "man:honed.toml(5)",
)
NOTICE_REFUSED = Message(
    "b34447786c7c437ba26362b59dd55001",
    "A notice of a job's end was refused, or found no room",
    """
    Its receiver said that it will never take it, [notify] in honed.toml does not allow that receiver any more, or too
    many wait already. What was refused lies in /var/lib/honed/outbox/notices/refused with the answer, and is sent once
    more with

      systemctl reload honed-send
    """,
    "man:honed.toml(5)",
)

LIFE = (
    READY,
    STOPPING,
    RELOADED,
    CONFIG_REFUSED,
    DEGRADED,
    RECOVERED,
    DATABASE_DAMAGED,
    ENTRY_DAMAGED,
    ACCEPTED,
    STARTED,
    CHECKPOINT,
    FALLBACK,
    ADJUSTED,
    WAITS_FOR_ROOM,
    SUCCEEDED,
    CANCELLED,
    HELD,
    SEND_TROUBLE,
    ROW_REFUSED,
    ROWS_LOST,
    NOTICE_TROUBLE,
    NOTICE_REFUSED,
)

#: Characters of a line: `journalctl -x` puts three before it, and a terminal has 80.
TEXT_WIDTH = 76
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}

_HEAD = """\
# What `journalctl -x` says of honed's entries.
# Made by `python -m honed.cli.reference --write docs`; change daemon/honed/system/message.py instead.
"""


def of_error(code: str) -> Message:
    """Return the explanation of an error code; for an unknown one, that of an internal error."""
    return BY_ERROR.get(code, BY_ERROR["error"])


def catalog() -> str:
    """Return the text of units/honed.catalog, in the format of https://systemd.io/CATALOG."""
    assert set(BY_ERROR) == set(BY_CODE), "every code is explained"
    return "\n".join([_HEAD, *(_entry(message) for message in (*LIFE, *BY_ERROR.values()))])


def _entry(message: Message) -> str:
    lines = [
        f"-- {message.id}",
        f"Subject: {message.subject}",
        "Defined-By: honed",
        f"Documentation: {message.documentation}",
    ]
    blocks = textwrap.dedent(message.text).strip().split("\n\n")
    # Commands are indented and not wrapped.
    wrapped = [block if block.startswith(" ") else textwrap.fill(block, TEXT_WIDTH, **_WHOLE) for block in blocks]
    return "\n".join([*lines, "", "\n\n".join(wrapped), ""])
