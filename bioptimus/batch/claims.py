"""Claims keep two processes, on one machine or on many, off the same slide.

A claim is a small JSON file beside the result, ``<name>.h5.claim``, created with ``O_EXCL`` and
removed when its holder is done. While held, its modification time is renewed: the heartbeat. A
claim whose holder is gone is taken over by exactly one other process, after ``MISSED_HEARTBEATS``
or at once when the holder ran on this machine and is seen to be dead.

What this rests on, and what not: ``O_EXCL`` creation and ``rename`` are atomic on local file
systems, NFS (version 3 and later), Lustre and GPFS. File locks are not used; they fail or lie
on shared file systems. Clocks of different machines are never compared: "now" is the time that
the file system gives to a file written just then. A claim is opened, not only looked up, before it
is judged, since NFS may serve attributes from memory until the file is opened.

Taking over without a race: whoever finds claim *T* stale must first create the *ticket*, a claim
file named after *T* (``<name>.h5.claim.<T>``), and only the ticket's holder may move *T* away; it
looks again before it does, so a late-comer who judged *T* before that finds another claim in
place and leaves it. A ticket left by a process that died at just that moment is itself a claim
and is taken over by the same rule.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from bioptimus.batch.batch_system import job_id
from bioptimus.errors import OutputError
from bioptimus.inference.disk import ANOTHER_OUT, boot_id, refuse_folder

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
MISSED_HEARTBEATS = 5


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What a claim says about the process that made it.

    Attributes:
        token: Unique to this claim.
        host: Name of the machine.
        pid: Number of the process there.
        job: Id of its batch job, if any.
        since: When the claim was made, seconds since 1970 by that machine's clock.
        heartbeat_s: How often the claim is renewed.
        machine: Which boot and process namespace ``pid`` belongs to; empty where unknown.
        started: When the process started, in the kernel's ticks; tells it from a later process
            with the same number.
    """

    token: str
    host: str
    pid: int
    job: str | None = None
    since: float
    heartbeat_s: float
    machine: str = ""
    started: int | None = None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class Claim:
    """The right to work on one slide's result, held by this process until released.

    Owner: whoever called ``take``; use it as a context manager. One daemon thread per process
    renews all claims; it starts with the first and is joined when the last is released. (A daemon,
    since a claim that a crash left unreleased must go stale, not keep the process alive.)
    """

    def __init__(self, path: Path, holder: Holder) -> None:
        """Wrap a claim file that was just created; use ``take`` instead."""
        self.path = path
        self.holder = holder
        self._pid = os.getpid()
        self._renewed = time.monotonic()
        self._lost = False
        self._released = False

    @classmethod
    def take(
        cls, output: Path, *, heartbeat_s: float = HEARTBEAT_S, dead: "Beat | None" = None
    ) -> Self | None:
        """Claim a result file, creating its folder if need be.

        Look for the finished result *after* taking the claim: another process may have finished
        and released it a moment ago.

        Args:
            output: Final path of the result, ``….h5``.
            heartbeat_s: Seconds between renewals.
            dead: A beat of the claim there that was watched for its ``patience_s``, and no other
                followed: stale whatever the file system's clock says, which may have gone back.

        Returns:
            The claim, or None when another process holds it; ``read_holder`` tells which.

        Raises:
            OutputError: The claim cannot be written there, in the OS's words.
        """
        path = claim_path(output)
        refuse_folder(path)
        holder = _this_process(heartbeat_s)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _acquire(path, holder, dead):
                return None
        except FileExistsError as exc:
            raise OutputError(
                f"{exc.filename}: is a file, not a folder; move it away, or choose another --out"
            ) from exc
        except OSError as exc:
            where = f": {exc.filename}" if exc.filename else ""
            raise OutputError(
                f"{path}: cannot claim this slide: {exc.strerror}{where}; {ANOTHER_OUT}"
            ) from exc
        claim = cls(path, holder)
        try:
            _heart.add(claim)
        except RuntimeError:  # no thread can be started
            claim.release()
            raise
        return claim

    def release(self) -> None:
        """Give the slide free. Twice is once; after a fork, the child's copy does nothing."""
        if self._released or self._pid != os.getpid():
            return
        self._released = True
        _heart.remove(self)
        try:
            self._remove()
        except OSError as exc:
            # The result is safe by then; a claim left behind goes stale.
            logger.warning("%s: cannot remove this claim: %s", self.path, exc.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def renew(self) -> None:
        """Renew the modification time; called by the heartbeat thread."""
        try:
            seen = _look(self.path)
            if self._released:
                return
            if seen is None or seen.token != self.holder.token:
                if not self._lost:
                    logger.warning("%s: this claim was taken over or removed", self.path)
                self._lost = True
                return
            os.utime(self.path)
            self._renewed = time.monotonic()
        except OSError as exc:
            if self._released:
                return
            logger.warning("%s: cannot renew this claim: %s", self.path, exc.strerror)

    def _remove(self) -> None:
        since = time.monotonic() - self._renewed
        if since < self.holder.heartbeat_s * MISSED_HEARTBEATS / 2:
            # Nobody can have judged it stale.
            _unlink_if(self.path, self.holder.token)
            return
        # This process slept too long: it may be taken over just now, so go by the same rule.
        ticket = _ticket(self.path, self.holder.token)
        if _acquire(ticket, _this_process(self.holder.heartbeat_s)):
            try:
                _unlink_if(self.path, self.holder.token)
            finally:
                _unlink(ticket)


def claim_path(output: Path) -> Path:
    """Return where the claim of a result lies."""
    return output.with_name(output.name + ".claim")


def read_holder(output: Path) -> Holder | None:
    """Say who holds the claim of a result; None if nobody does, or it is being written."""
    try:
        seen = _look(claim_path(output))
    except OSError:
        return None
    return None if seen is None else seen.holder


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What shows from outside that somebody holds a claim.

    Attributes:
        token: The claim's.
        mtime_ns: When it was renewed, by the clock of the file system.
        runs_here: Whether its holder is seen to run on this machine.
        may_be_before: Whether its holder may be what this process was before it was started again:
            on a machine of this one's name, as a container keeps, or in this batch job.
        patience_s: How long to wait for the next.
    """

    token: str
    mtime_ns: int
    runs_here: bool
    may_be_before: bool
    patience_s: float


def last_beat(output: Path) -> Beat | None:
    """Look at the claim of a result; None if there is none, or it cannot be read.

    A holder that cannot be seen from here is alive if another beat follows.
    """
    try:
        seen = _look(claim_path(output))
    except OSError:
        return None
    if seen is None:
        return None
    holder = seen.holder
    heartbeat_s = holder.heartbeat_s if holder else HEARTBEAT_S
    same_job = holder is not None and holder.job is not None and holder.job == job_id()
    return Beat(
        token=seen.token,
        mtime_ns=seen.mtime_ns,
        runs_here=holder is not None and _is_here(holder) and not _is_dead(holder),
        may_be_before=same_job or holder is None or holder.host == socket.gethostname(),
        patience_s=heartbeat_s * MISSED_HEARTBEATS,
    )


# Files.


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A claim file as found: its holder is None while half written or damaged."""

    token: str
    mtime_ns: int
    holder: Holder | None


def _acquire(path: Path, holder: Holder, dead: Beat | None = None) -> bool:
    """Create a claim file, or take it over when its holder is gone; OSError as it comes."""
    if _create(path, holder):
        return True
    seen = _look(path)
    if seen is None:  # released just now
        return _create(path, holder)
    watched = dead is not None and (dead.token, dead.mtime_ns) == (seen.token, seen.mtime_ns)
    if not watched and not _is_stale(path, seen, holder.heartbeat_s):
        return False
    ticket = _ticket(path, seen.token)
    if not _acquire(ticket, holder):
        return False
    try:
        again = _look(path)
        if again is not None:
            if again.token != seen.token or again.mtime_ns != seen.mtime_ns:
                return False
            os.replace(path, ticket)
            logger.info("%s: taken over from %s, which is gone", path, seen.holder or "a process")
        return _create(path, holder)
    finally:
        _unlink(ticket)


def _create(path: Path, holder: Holder) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as stream:
            stream.write(json.dumps(asdict(holder)).encode())
    except OSError:
        _unlink(path)
        raise
    return True


def _look(path: Path) -> _Seen | None:
    try:
        with path.open("rb") as stream:
            text = stream.read()
            status = os.fstat(stream.fileno())
    except FileNotFoundError:
        return None
    holder = _parse(text)
    # Without a readable token the file itself is the claim's name.
    token = holder.token if holder else f"i{status.st_ino}"
    return _Seen(token=token, mtime_ns=status.st_mtime_ns, holder=holder)


def _parse(text: bytes) -> Holder | None:
    try:
        values = json.loads(text)
        holder = Holder(**{f.name: values[f.name] for f in fields(Holder)})
        usable = (
            isinstance(holder.pid, int)
            and holder.heartbeat_s > 0
            and uuid.UUID(holder.token).hex == holder.token  # it becomes part of a file name
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return holder if usable else None


def _ticket(path: Path, token: str) -> Path:
    return path.with_name(f"{path.name}.{token}")


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _unlink_if(path: Path, token: str) -> None:
    seen = _look(path)
    if seen is not None and seen.token == token:
        _unlink(path)


def _is_stale(path: Path, seen: _Seen, heartbeat_s: float) -> bool:
    if seen.holder is not None:
        if _is_dead(seen.holder):
            return True
        heartbeat_s = seen.holder.heartbeat_s
    age_s = (_file_system_now_ns(path) - seen.mtime_ns) / 1e9
    return age_s > heartbeat_s * MISSED_HEARTBEATS


def _file_system_now_ns(beside: Path) -> int:
    """Return the time by the clock that stamps the files there, nanoseconds since 1970."""
    probe = _ticket(beside, f"{uuid.uuid4().hex}.now")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
        _unlink(probe)


# Processes.


def _this_process(heartbeat_s: float) -> Holder:
    return Holder(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=job_id(),
        since=time.time(),
        heartbeat_s=heartbeat_s,
        machine=_machine(),
        started=_start_ticks(os.getpid()),
    )


def _machine() -> str:
    """Name the boot and the process namespace; empty where the system does not tell.

    A host name is not enough: containers share it with other process numbers behind it, and
    machines copied from one image have the same.
    """
    try:
        # In a container that shows the host's /proc, the numbers there are other processes'.
        if os.readlink("/proc/self") == str(os.getpid()) and (boot := boot_id()):
            return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        pass
    return ""


def _is_here(holder: Holder) -> bool:
    """Whether the holder's number is one of the processes that this one sees."""
    return bool(holder.machine) and holder.machine == _machine()


def _is_dead(holder: Holder) -> bool:
    """Whether the holder ran here and is gone; False when that cannot be known."""
    if not _is_here(holder):
        return False
    ticks = _start_ticks(holder.pid)
    if ticks is not None:
        return ticks != holder.started
    return not _runs_unseen(holder.pid)


def _runs_unseen(pid: int) -> bool:
    """Whether another user's process has this number, where /proc shows only one's own."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _start_ticks(pid: int) -> int | None:
    """Return when a process started; None if there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in brackets may hold spaces and brackets itself.
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(numbers[18])


class _Heart:
    """The thread that renews every claim of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claims: set[Claim] = set()
        self._thread: threading.Thread | None = None

    def add(self, claim: Claim) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._beat, name="claims", daemon=True)
                thread.start()
                self._thread = thread
            self._claims.add(claim)
            self._changed.notify_all()  # the new claim may need a quicker beat

    def remove(self, claim: Claim) -> None:
        with self._changed:
            self._claims.discard(claim)
            thread = None
            if not self._claims:
                thread, self._thread = self._thread, None
                self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _beat(self) -> None:
        me = threading.current_thread()
        due = 0.0
        while True:
            with self._changed:
                if self._thread is not me:
                    return
                wait_s = min(claim.holder.heartbeat_s for claim in self._claims)
                due = min(due or time.monotonic() + wait_s, time.monotonic() + wait_s)
                if (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                claims = list(self._claims)
            due = 0.0
            for claim in claims:
                claim.renew()


_heart = _Heart()


def _forget_claims() -> None:
    """After a fork the claims are the parent's, and the thread is not there."""
    global _heart
    _heart = _Heart()


os.register_at_fork(after_in_child=_forget_claims)
