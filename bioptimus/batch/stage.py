"""Copy slides from slow storage to a fast local disk ahead of their use."""

import errno
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Self

from bioptimus.batch.batch_system import job_id
from bioptimus.batch.claims import Claim, claim_path
from bioptimus.batch.inputs import SlideInput
from bioptimus.errors import OutputError, UsageError

logger = logging.getLogger(__name__)

COPY_BLOCK_BYTES = 8 << 20
_PREFIX = "bioptimus"


class _State(Enum):
    WAITING = auto()
    COPYING = auto()
    READY = auto()
    IN_USE = auto()
    GIVEN_UP = auto()


@dataclass(eq=False)
class _Copy:
    """One slide's copy; ``size_bytes`` counts against the limit from COPYING to its removal."""

    slide: SlideInput
    folder: Path
    number: int
    state: _State = _State.WAITING
    size_bytes: int = 0
    dropped: bool = False


def staging_folder(stage: Path) -> Path:
    """The folder with variables looked up, such as ``$TMPDIR``, which each node sets for itself.

    Raises:
        UsageError: One is not set here.
    """
    folder = os.path.expandvars(stage)
    unset = re.search(r"\$(\w+|\{\w+\})", folder)
    if unset is not None:
        raise UsageError(f"--stage {stage}: {unset[0]} is not set here; name a folder that is")
    return Path(folder)


class Stager:
    """Copies slides, with their companions, to a private folder ahead of use.

    The copies are in a folder of this process's own, made below the folder given and removed
    with everything in it when the stager closes, also after an error. A claim beside it tells
    whose it is, so that the next run can remove what a killed one left; nothing else there is
    touched. Copies together never exceed the limit: when it is reached, copying waits until a
    slide has been used and its copy removed. That bound is the back-pressure.

    Only slides that the run takes are copied, and few of them ahead: see ``plan``. So several
    processes that share a list do not copy the same slide, nor keep many from each other.

    Staging never fails a slide. Whatever cannot be copied (too large, unreadable, disk full) is
    read where it lies; when the folder cannot be written, one warning is logged and no more is
    copied.

    Owner: the run. One thread copies in the order of ``plan``; ``staged`` may be called from any
    thread and in any order.
    """

    def __init__(self, folder: Path, *, max_gb: float) -> None:
        """Make the private folder.

        Args:
            folder: Where to make it, such as a node's local disk; created if missing.
            max_gb: Most that the copies may take together, in 10^9 bytes.

        Raises:
            UsageError: ``max_gb`` is not positive, or the folder cannot be made or written.
            OutputError: The disk is full.
        """
        if not max_gb > 0:
            raise UsageError(f"--stage-gb {max_gb:g}: must be above 0")
        host = socket.gethostname().replace("/", "_")  # Linux takes any name
        name = "-".join([_PREFIX, host, job_id() or "nojob", ""])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            # The name tells people whose it is; mkdtemp makes it new, and ours alone.
            self.folder = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (OutputError if full else UsageError)(
                f"{folder}: slides cannot be staged there ({exc.strerror}); choose another --stage"
            ) from exc
        self._limit_bytes = int(max_gb * 1e9)
        self._changed = threading.Condition()
        self._copies: dict[Path, _Copy] = {}
        self._used_bytes = 0
        self._closing = False
        self._disabled = False
        self._thread: threading.Thread | None = None
        self._claim_of_folder: Claim | None = None
        try:
            self._claim_of_folder = Claim.take(self.folder)
        except OutputError as exc:
            # It speaks of a slide and of --out.
            reason = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else exc
            logger.warning(
                "%s: cannot be claimed (%s); after a kill, its copies have to be removed by hand",
                self.folder,
                reason,
            )

    def plan(
        self, slides: Iterable[SlideInput], *, ahead: int, take: Callable[[int], bool]
    ) -> None:
        """Begin to copy slides in this order, in the background. Call it once.

        Args:
            slides: All that may be asked for.
            ahead: Most copies that wait for their use.
            take: Asked with a slide's place in the order before it is copied: whether this run
                has taken it, for itself alone, and wants the copy.
        """
        with self._changed:
            copies = [self._entry(slide) for slide in slides]
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(
                    target=self._run, args=(copies, ahead, take), name="stage"
                )
                self._thread.start()

    def may_copy(self, slide: SlideInput) -> bool:
        """Whether a slide can be copied at all: not one that is larger than the limit, or gone."""
        size_bytes = _size(slide)
        return size_bytes is not None and size_bytes <= self._limit_bytes

    @contextmanager
    def staged(self, slide: SlideInput) -> Iterator[Path]:
        """Give the path to read a slide from, for the time of a ``with`` block.

        Waits for a copy that is under way; copies now if it was not begun and fits.

        Yields:
            The copy, with the slide's file name and its companions beside it, or the slide's
            own path.
        """
        copy = self._claim(slide)
        try:
            yield slide.path if copy is None else copy.folder / slide.path.name
        finally:
            if copy is not None:
                self._remove(copy)

    def drop(self, slide: SlideInput) -> None:
        """Forget a slide that will not be read, such as one that another job has claimed."""
        with self._changed:
            copy = self._copies.get(slide.path)
            if copy is None:
                return
            copy.dropped = True
            if copy.state is _State.READY:
                self._remove_locked(copy)
            elif copy.state is _State.WAITING:
                self._give_up(copy)

    def close(self) -> None:
        """Stop copying and remove the private folder. Twice is once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            logger.warning("%s: some staged copies could not be removed", self.folder)
        if self._claim_of_folder is not None:
            self._claim_of_folder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, slide: SlideInput) -> _Copy:
        number = len(self._copies)
        return self._copies.setdefault(
            slide.path, _Copy(slide=slide, number=number, folder=self.folder / f"{number:06}")
        )

    def _run(self, copies: list[_Copy], ahead: int, take: Callable[[int], bool]) -> None:
        made: list[_Copy] = []

        def may_go_on() -> bool:
            # Few at any time, out of lists of 100,000.
            made[:] = [copy for copy in made if copy.state is _State.READY]
            return self._closing or self._disabled or len(made) < ahead

        for index, copy in enumerate(copies):
            with self._changed:
                self._changed.wait_for(may_go_on)
                if self._closing or self._disabled:
                    return
            if take(index) and self._reserve(copy, wait=True):
                self._fill(copy)
                made.append(copy)

    def _claim(self, slide: SlideInput) -> _Copy | None:
        """Return the finished copy, now in use; None to read the slide in place."""
        with self._changed:
            copy = self._entry(slide)
            self._changed.wait_for(lambda: copy.state is not _State.COPYING)
        if copy.state is _State.WAITING and self._reserve(copy, wait=False):
            self._fill(copy)
        with self._changed:
            self._changed.wait_for(lambda: copy.state is not _State.COPYING)
            if copy.state is _State.READY:
                copy.state = _State.IN_USE
                self._changed.notify_all()
                return copy
            if copy.state is _State.WAITING:
                self._give_up(copy)  # read in place: a copy would come too late
            return None

    def _reserve(self, copy: _Copy, *, wait: bool) -> bool:
        """Set aside room for a copy and mark it COPYING; False if it will not be copied now."""
        size_bytes = _size(copy.slide)
        with self._changed:
            if size_bytes is None or size_bytes > self._limit_bytes:
                if copy.state is _State.WAITING:
                    self._give_up(copy)
                return False
            while True:
                if self._closing or self._disabled or copy.state is not _State.WAITING:
                    return False
                if self._used_bytes + size_bytes <= self._limit_bytes:
                    break
                if wait:
                    self._changed.wait()
                elif not self._evict(copy.number):
                    return False
            copy.state, copy.size_bytes = _State.COPYING, size_bytes
            self._used_bytes += size_bytes
            return True

    def _evict(self, number: int) -> bool:
        """Remove one ready copy to make room for that of ``number``; False if there is none."""
        ready = [copy for copy in self._copies.values() if copy.state is _State.READY]
        if not ready:
            return False
        # One before it in the plan was passed over; otherwise the one whose turn is last.
        self._remove_locked(ready[0] if ready[0].number < number else ready[-1])
        return True

    def _fill(self, copy: _Copy) -> None:
        done = False
        try:
            done = self._write(copy)
        finally:
            with self._changed:
                if done and not copy.dropped:
                    copy.state = _State.READY
                    self._changed.notify_all()
                else:
                    self._remove_locked(copy)

    def _write(self, copy: _Copy) -> bool:
        """Copy every file of a slide; False if that failed or the stager is closing."""
        base = copy.slide.path.parent
        for source in copy.slide.files():
            target = copy.folder / source.relative_to(base)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if not self._copy_file(source, target):
                    return False
            except _SourceError as exc:
                logger.info("%s: not staged: %s", copy.slide.path, exc)
                return False
            except OSError as exc:
                self._disable(exc)
                return False
        return True

    def _copy_file(self, source: Path, target: Path) -> bool:
        """Copy one file; False if the stager is closing.

        Raises:
            _SourceError: The source cannot be read, or changed meanwhile.
            OSError: The target cannot be written.
        """
        copied = 0
        with _reading(source):
            reader = source.open("rb", buffering=0)
        with reader, target.open("xb", buffering=0) as writer:
            while not self._closing:
                with _reading(source):
                    block = reader.read(COPY_BLOCK_BYTES)
                if not block:
                    break
                view = memoryview(block)
                while view:
                    view = view[writer.write(view) :]
                copied += len(block)
        if self._closing:
            return False
        with _reading(source):
            expected = source.stat().st_size
        found = target.stat().st_size
        if not expected == copied == found:
            raise _SourceError(f"{source} has {expected} bytes, its copy {found}")
        return True

    def _disable(self, cause: OSError) -> None:
        with self._changed:
            first = not self._disabled
            self._disabled = True
            self._changed.notify_all()
        if first:
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            logger.warning(
                "%s: %s; slides are read where they lie from now on%s",
                self.folder,
                cause.strerror,
                " (a lower --stage-gb may fit)" if full else "",
            )

    def _remove(self, copy: _Copy) -> None:
        with self._changed:
            self._remove_locked(copy)

    def _remove_locked(self, copy: _Copy) -> None:
        shutil.rmtree(copy.folder, ignore_errors=True)
        self._used_bytes -= copy.size_bytes
        copy.size_bytes = 0
        self._give_up(copy)

    def _give_up(self, copy: _Copy) -> None:
        copy.state = _State.GIVEN_UP
        self._changed.notify_all()


def _remove_leftovers(folder: Path) -> None:
    """Remove the copies of runs that were killed before they could."""
    for path in folder.glob(claim_path(folder / f"{_PREFIX}-*").name):
        left = path.with_suffix("")
        try:
            claim = Claim.take(left)
        except OutputError as exc:
            logger.info("%s: left where it is: %s", left, exc)
            continue
        if claim is not None:
            with claim:
                shutil.rmtree(left, ignore_errors=True)


class _SourceError(Exception):
    """The slide could not be read; the staging folder is not to blame."""


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _SourceError(f"{source}: {exc.strerror}") from exc


def _size(slide: SlideInput) -> int | None:
    """Return the bytes to copy as they are now; None where the slide cannot be copied whole."""
    base = slide.path.parent
    total = 0
    try:
        for path in slide.files():
            path.relative_to(base)
            total += path.stat().st_size
    except (OSError, ValueError):
        return None
    return total
