"""Arrivals on their way to be checked: files in incoming/ and job files from the control socket.

    incoming/ ── listed ── whole ──► claimed/<id>/ ── copied ──► checks
    socket    ── claimed/<id>/ ────────────────────── copied ──► checks

Users take turns, weighted (turns.py): a flood of one user's files delays nobody else's.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set, Sized
from dataclasses import dataclass

from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.checks import MAX_TOGETHER, Checks, Pending
from honed.daemon.arrivals.rejection import Rejection
from honed.daemon.arrivals.turns import Turns
from honed.daemon.arrivals.watcher import Watcher
from honed.job.arrival import Arrivals, Claim, Copy, Dropped, too_large
from honed.job.entitlement import Entitlements
from honed.job.job import Job
from honed.job.refusals import shown
from honed.spec.config import Config
from honed.system import durable, untrusted
from honed.system.error import EnvironmentInvalidError, HonedError, said
from honed.system.log import about
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Arrivals of one user that are claimed and not checked yet, at most: the rest of a flood stays in incoming/, where it
#: costs nothing and delays nobody.
MAX_PENDING = 64
#: Arrivals looked at in one pass; and the pause between two listings of incoming/, as a multiple of a listing's
#: duration.
MAX_LOOKS_PER_PASS = 200
LISTING_REST = 20
#: Seconds of a pass in which incoming/ is listed, and the names that are looked at before the next look at the clock.
LISTING_SEC = 0.02
MAX_TOGETHER_LISTED = 500
#: Files of one user that are known and not looked at, at most: the rest of a flood is added by later listings.
MAX_LISTED = 20_000
#: Files of which a listing awaits the events, at most: in a flood of more, the others do not wait.
MAX_UNNAMED = 20_000
#: Seconds between two looks at a file that was not whole, unless an event comes for it.
LOOK_AGAIN_SEC = 0.25
#: Seconds in which the event of a file comes that a listing has found: watchdog holds events back for half a second
#: where files leave the directory.
EVENT_SEC = 1.0
#: Failed attempts to take an arrival, after which it is left in incoming/.
MAX_DENIALS = 3
#: Unchecked files of one user that came over the control socket, and their bytes: they are on honed's disk, and not in
#: the user's quota. One file of the largest size has room.
MAX_SUBMITTED, MAX_SUBMITTED_BYTES = 10_000, 64 * 1024 * 1024


@dataclass
class _Known:
    """A file that is to be claimed: its stat when it was queued, and its inode from scandir (overlayfs reports another
    one in stat), None before the first listing."""

    file: Dropped
    inode: int | None


class Listing:
    """Files in incoming/ that were not taken yet, in the order of their users.

    A file's place is by the last event that may have completed it. One that a listing finds first waits for its event;
    where none comes, its place is by when a listing saw it, and within one by its time, which clock jumps falsify. A
    listing looks only at files that it did not know: it costs one scandir, however many files wait.
    """

    def __init__(self, arrivals: Arrivals, watcher: Watcher) -> None:
        self._arrivals = arrivals
        self._watcher = watcher
        self.not_looked_at: dict[int, OrderedDict[str, None]] = {}  #: names by owner
        self._looked_at: dict[str, int] = {}  # lately, and not claimed; name → owner
        self._unnamed: dict[str, float] = {}  # name → when a listing first saw it, of those that await their event
        self._round_at = 0.0  # when the last round of looks began
        self._known: dict[str, _Known] = {}  # all that are to be claimed
        self._left: dict[str, int] = {}  # name → inode
        self._num_denials: dict[str, int] = {}
        self._was_watching = False  # at the last listing
        self._listing: Iterator[None] | None = None  # under way
        self.took_sec = 0.0  #: the time that it took so far
        self.has_more = False  #: a user has more files than are known

    @property
    def num_unsettled(self) -> int:
        """Number of files that were seen and not claimed, such as files that are still being written."""
        return len(self._looked_at) + len(self._unnamed) + self.has_more

    def refresh(self, now: float) -> bool:
        """List incoming/, or go on with it for a moment. Returns True once it is listed; meanwhile, `add_hinted` adds
        what comes."""
        until = time.monotonic() + LISTING_SEC
        listing = self._listing = self._listing or self._list(now)
        try:
            for _ in listing:
                if time.monotonic() >= until:
                    return False
        except BaseException:
            self._listing = None  # the next one starts from the beginning
            raise
        self._listing = None
        return True

    def _list(self, now: float) -> Iterator[None]:
        """List incoming/, and yield after every few hundred names."""
        hinted = self._watcher.take_hinted()
        before, present = dict(self._known), dict[str, int]()
        for names in self._arrivals.listing():
            present.update(names)
            yield
        self._watcher.keep(present.keys())
        for name, known in before.items():
            if name not in present and self._known.get(name) is known:  # else it came, or was claimed, meanwhile
                self._forget(name)
                self._left.pop(name, None)
                self._num_denials.pop(name, None)
        self._look_again(now)
        was_watching, self._was_watching = self._was_watching, self._watcher.is_watching
        if was_watching:  # else what was there before has no event
            self._add(hinted)
        due, unnamed = list[str](), dict[str, float]()
        for number, (name, inode) in enumerate(present.items(), 1):
            known_now = self._known.get(name)
            if known_now is not None and known_now.inode is None:
                known_now.inode = inode
            elif known_now is None or known_now.inode != inode:
                seen = self._unnamed.get(name, now)
                if was_watching and len(unnamed) < MAX_UNNAMED:
                    unnamed[name] = seen
                if name not in unnamed or now >= seen + EVENT_SEC:
                    due.append(name)
            if number % MAX_TOGETHER_LISTED == 0:
                yield
        seen_at, self._unnamed, self.has_more = dict(unnamed), unnamed, False
        for first in range(0, len(due), MAX_TOGETHER_LISTED):
            some = self._arrivals.dropped_of(due[first : first + MAX_TOGETHER_LISTED])
            for file in sorted(some, key=lambda file: seen_at.get(file.path.name, now)):
                self._append(file, present[file.path.name])
            yield

    def add_hinted(self, now: float) -> None:
        """Add what has come since the last listing, and what was not whole when it was looked at: in a flood, the
        next listing may be seconds away."""
        if now >= self._round_at + LOOK_AGAIN_SEC:
            self._look_again(now)
        self._add(self._watcher.take_hinted())

    def _look_again(self, now: float) -> None:
        """Begin a round: let the files that were looked at and not claimed be the first ones again."""
        for name, uid in reversed(self._looked_at.items()):
            own = self.not_looked_at.setdefault(uid, OrderedDict())
            own[name] = None
            own.move_to_end(name, last=False)
        self._looked_at.clear()
        self._round_at = now

    def next_of(self, uid: int) -> str:
        """Take a user's first file off the list of those that were not looked at."""
        own = self.not_looked_at[uid]
        name, _ = own.popitem(last=False)
        if not own:
            del self.not_looked_at[uid]
        return name

    def is_whole(self, uid: int, name: str) -> bool:
        """Look at a user's file. Return True if it can be claimed now."""
        path = self._arrivals.incoming / name
        if path.name in self._left and self._left[path.name] == _inode(path):
            return False
        self._looked_at[name] = uid  # until it is claimed, or looked at again
        return self._watcher.is_whole(path, self._round_at)

    def _add(self, hinted: Sequence[str]) -> None:
        """Add files behind all others of their users, in this order; also those that were known and have changed
        since, or have been replaced by another. An event that is late moves nothing."""
        files = {file.path.name: file for file in self._arrivals.dropped_of(hinted)}
        for name in hinted:
            file, known = files.get(name), self._known.get(name)
            if file is not None and (known is None or known.file != file or name in self._left):
                self._left.pop(name, None)  # even if it has the inode of the one that could not be taken
                self._append(file, None)

    def _append(self, file: Dropped, inode: int | None) -> None:
        name, uid = file.path.name, file.uid
        if name in self._known:
            self._forget(name)
        self._unnamed.pop(name, None)
        if len(self.not_looked_at.get(uid, ())) >= MAX_LISTED:
            self.has_more = True  # a later listing adds it
            return
        self._known[name] = _Known(file, inode)
        self.not_looked_at.setdefault(uid, OrderedDict())[name] = None

    def _forget(self, name: str) -> None:
        uid = self._known.pop(name).file.uid
        self._looked_at.pop(name, None)
        own = self.not_looked_at.get(uid)
        if own is not None and name in own:
            del own[name]
            if not own:
                del self.not_looked_at[uid]

    def claim(self, names: list[str]) -> tuple[list[Claim], list[Exception]]:
        """Claim these files. Returns the claims, and the machine's faults that prevented others."""
        claims: list[Claim] = []
        faults: list[Exception] = []
        paths = [self._arrivals.incoming / name for name in names]
        for path, taken in zip(paths, self._arrivals.claim_all(paths), strict=True):
            match taken:
                case IsADirectoryError() if taken.filename == str(path):
                    self._leave(path, taken)
                case PermissionError() if taken.filename == str(path):  # else the error is about a directory of our own
                    self._num_denials[path.name] = self._num_denials.get(path.name, 0) + 1
                    if self._num_denials[path.name] < MAX_DENIALS:
                        continue  # the next attempt may succeed
                    self._leave(path, taken)
                case Exception():
                    faults.append(taken)
                    continue
                case Claim():
                    claims.append(taken)
                    self._left.pop(path.name, None)
            self._watcher.forget(path.name)
            self._num_denials.pop(path.name, None)
            self._looked_at.pop(path.name, None)
            if path.name not in self._left:
                del self._known[path.name]
        return claims, faults

    def _leave(self, path: PersonPath, error: OSError) -> None:
        """Leave an arrival that cannot be taken (a directory) where it is, and log it once."""
        if (inode := _inode(path)) is not None:
            self._left[path.name] = inode
            log.warning("%r in %s cannot be taken: %s", path.name, path.parent, error.strerror)


def _inode(path: PersonPath) -> int | None:
    return next((info.st_ino for _, info in untrusted.infos(path.parent, [path.name])), None)


class Incoming:
    """Claims arrivals, copies them, and has them checked."""

    def __init__(
        self,
        arrivals: Arrivals,
        watcher: Watcher,
        checkers: Checkers,
        checks: Checks,
        rejection: Rejection,
        config: Callable[[], Config],
        num_waiting: Callable[[int], tuple[int, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_waiting` returns how many of a user's arrivals wait for a fetch, and how many for jobs they name."""
        self._num_waiting = num_waiting
        self._arrivals = arrivals
        self._checkers = checkers
        self._checks = checks
        self._rejection = rejection
        self._config = config
        self._clock = clock
        self._entitlements = Entitlements(config)
        self._turns = Turns(self._entitlements.weight)
        self._listing = Listing(arrivals, watcher)
        self._submitted: dict[int, deque[Claim]] = {}  # came over the control socket and not copied yet, by submitter
        self._list_at = 0.0
        self._must_list = False
        self._tried: set[int] = set()  # claims that could not be settled
        self._late: list[Job] = []  # accepted, although an error followed after their entry was written

    @property
    def num_unsettled(self) -> int:
        """Number of arrivals that can be taken, plus one if more may have arrived since the last listing."""
        arrivals = sum(
            len(waiting) for uid, waiting in self._lists() if not (self._checkers.is_stuck(uid) or self.is_full(uid))
        )
        return self._listing.num_unsettled + arrivals + self._must_list

    @property
    def num_seen(self) -> int:
        """Number of arrivals that are not being checked yet; files may still be being written."""
        return self._listing.num_unsettled + sum(len(waiting) for _, waiting in self._lists())

    @property
    def num_stuck(self) -> int:
        """Number of arrivals that were not looked at, as they cannot be checked for now."""
        return sum(len(waiting) for uid, waiting in self._lists() if self._checkers.is_stuck(uid))

    @property
    def num_beyond(self) -> int:
        """Number of arrivals of users who have as many queued jobs as they may."""
        return sum(len(waiting) for uid, waiting in self._lists() if self.is_full(uid))

    def is_full(self, uid: int) -> bool:
        """Return True if a user has as many queued jobs as they may: further arrivals are not looked at."""
        return self._room_of(uid) <= 0

    def beyond(self, uid: int) -> str:
        """Return how many of a user's arrivals wait for their queued jobs, as a sentence; empty if none does."""
        num = sum(len(waiting) for owner, waiting in self._lists() if owner == uid)
        limit, num_queued, num_waiting = self._counts(uid)
        if not num or num_queued + num_waiting < limit:
            return ""
        waiting = "1 job file waits" if num == 1 else f"{num} job files wait"
        if not num_waiting:
            return f"{waiting}: {limit} jobs are queued or held, the maximum (max_queued)"
        return (
            f"{waiting}: {num_queued} jobs are queued or held and {num_waiting} wait for a fetch or for jobs that they "
            f"name, and the maximum is {limit} (max_queued)"
        )

    def _counts(self, uid: int) -> tuple[int, int, int]:
        """Return the maximum of a user's queued jobs, their number, and that of the arrivals that will be queued."""
        num_queued = self._arrivals.num_queued(uid)
        return self._entitlements.max_queued(uid), num_queued, sum(self._num_waiting(uid))

    def _room_of(self, uid: int) -> int:
        """Return how many more arrivals of a user may be taken. If all that were taken wait for jobs that they name,
        there is room for one: it may be such a job."""
        limit, num_queued, num_waiting = self._counts(uid)
        num_fetched = self._num_waiting(uid)[0]
        return max(limit - num_queued - num_waiting, 0 if num_queued or num_fetched else 1)

    @property
    def has_late(self) -> bool:
        """True if `take_late` has jobs to return."""
        return bool(self._late)

    def take_late(self) -> list[Job]:
        """Return the jobs of earlier claims that turned out to be accepted already, without repetition."""
        late, self._late = self._late, []
        return late

    def submit(self, name: str, data: bytes, uid: int) -> Claim:
        """Take a job file over the control socket. Raises HonedError if it is not taken, and OSError if the machine
        prevents it."""
        if len(data) > (limit := self._config().spool.max_spec_bytes):
            raise too_large(name, limit)
        max_bytes = max(MAX_SUBMITTED_BYTES, limit)
        if not self._arrivals.submitted.has_room(uid, len(data), max_files=MAX_SUBMITTED, max_bytes=max_bytes):
            raise EnvironmentInvalidError(
                f"{shown(name)}: you already have too many job files waiting for their check: at most {MAX_SUBMITTED}"
                f" of {max_bytes // 2**20} MiB together are kept",
                hint="submit it again later; honectl list shows them",
            )
        claim = self._arrivals.submit(name, data, uid)
        self._submitted.setdefault(uid, deque()).append(claim)
        return claim

    def add(self, claims: Iterable[Claim]) -> None:
        """Add the arrivals that a sweep has become, as if their user had submitted them."""
        for claim in claims:
            self._submitted.setdefault(claim.uid, deque()).append(claim)

    def scan(self, known: Set[int]) -> None:
        """Take complete arrivals, and earlier claims that could not be settled; `known`: claims that others settle.

        Raises OSError if the machine prevents a claim, after the others were made.
        """
        now = self._clock()
        self._must_list = now < self._list_at
        if self._must_list:
            self._listing.add_hinted(now)
        else:
            is_listed = self._listing.refresh(now)
            self._listing.took_sec += self._clock() - now
            if is_listed:
                self._list_at, self._listing.took_sec = now + LISTING_REST * self._listing.took_sec, 0.0
            else:
                self._must_list = True
                self._listing.add_hinted(now)
        self._take_earlier(known)
        submitted, whole = self._take_by_turns()
        self._copy(submitted)
        claims, faults = self._listing.claim(whole)
        self._copy(claims)
        if faults:
            raise faults[0]

    def _lists(self) -> Iterator[tuple[int, Sized]]:
        yield from self._listing.not_looked_at.items()
        yield from self._submitted.items()

    def _take_by_turns(self) -> tuple[list[Claim], list[str]]:
        """Take as many arrivals off the lists as are claimed together, by turns of their users: claims from the control
        socket, which are a user's first ones, and whole files of incoming/.

        Users with too much under way, and users whose files cannot be checked, are skipped.
        """
        counts, submitted, whole = self._checks.num_by_user(), list[Claim](), list[str]()
        lists = {**self._submitted, **self._listing.not_looked_at}
        room = {
            uid: min(MAX_PENDING, self._room_of(uid)) - counts[uid] for uid in lists if not self._checkers.is_stuck(uid)
        }
        room = {uid: num for uid, num in room.items() if num > 0}
        num_looks = 0
        while room and len(submitted) + len(whole) < MAX_TOGETHER and num_looks < MAX_LOOKS_PER_PASS:
            uid = self._turns.first(room)
            self._turns.take(uid, room)
            if uid in self._submitted:
                submitted.append(self._submitted[uid].popleft())
                if not self._submitted[uid]:
                    del self._submitted[uid]
                room[uid] -= 1
            else:
                num_looks += 1
                if self._is_whole(uid, name := self._listing.next_of(uid)):
                    whole.append(name)
                    room[uid] -= 1
            if not room[uid] or not (uid in self._submitted or uid in self._listing.not_looked_at):
                del room[uid]
        if not any(self._submitted.get(uid) or self._listing.not_looked_at.get(uid) for uid in lists):
            self._turns.end()
        return submitted, whole

    def _is_whole(self, uid: int, name: str) -> bool:
        """Return True if a user's file can be claimed now; one that cannot be looked at is left to a later round."""
        try:
            return self._listing.is_whole(uid, name)
        except OSError as problem:
            self._rejection.fault = durable.machine_fault(problem) or said(problem)
            return False

    def _take_earlier(self, known: Set[int]) -> None:
        """Take up earlier claims: of a honed that was killed, or left unsettled by a full disk."""
        submitted = {claim.id for claims in self._submitted.values() for claim in claims}
        room = min(MAX_TOGETHER, MAX_PENDING - len(self._checks.being_checked()) - self._checks.num_checked)
        if room <= 0:
            self._must_list = True
            return
        claims = self._arrivals.claims(but={*known, *submitted, *self._tried}, limit=room)
        if not claims:
            self._tried.clear()  # tried once more at the next scan
            return
        self._tried |= {claim.id for claim in claims}
        self._must_list = True  # and then the arrivals behind them
        unsettled = []
        for claim in claims:
            try:
                job = self._arrivals.accepted(claim)
            except Exception as problem:  # noqa: BLE001 - the others are taken up all the same
                self._rejection.postpone(claim, problem)
                continue
            if job is not None:
                self._late.append(job)
            else:
                unsettled.append(claim)
        self._copy(unsettled)

    def _copy(self, claims: list[Claim]) -> None:
        """Copy claimed files, and have the copies checked."""
        config = self._config()
        for claim in claims:
            log.debug("job %d: claimed", claim.id, extra=about(claim.id))
        copies = self._arrivals.copy_all(
            claims,
            max_bytes=config.spool.max_spec_bytes,
            is_shared=config.policy.share_results,
            admin_group=config.policy.admin_group,
            drops=config.policy.arrivals == "spool",
        )
        for claim, copy in zip(claims, copies, strict=True):
            match copy:
                case HonedError():
                    self._rejection.reject(claim, copy)
                case Exception():
                    self._rejection.postpone(claim, copy)
                case Copy():
                    self._checks.begin(Pending(claim, copy))
