"""Every error this package raises on purpose.

::

    BioptimusError
    ├── UsageError (ValueError)          options that contradict each other or the input, or a
    │                                    value that is none; exit 2
    ├── SlideError                       one slide cannot be processed; the others go on
    │   ├── SlideOpenError               missing, empty, truncated, unsupported, not a slide
    │   ├── ResolutionError (ValueError) µm/px unknown, implausible, or too far from the tile's
    │   ├── SlideReadError               pixels could not be decoded, also after a reopening
    │   └── TissueError                  a mask file that does not fit or cannot be read
    ├── RequestError (ValueError)        one request is malformed; only its caller sees this
    ├── ModelError
    │   ├── CheckpointError (ValueError) missing, truncated, foreign or wrong-device ``.pt2``
    │   │   └── NoCheckpointError (UsageError)  nothing, or a folder, where a ``.pt2`` was named
    │   └── _ForwardError (RuntimeError) a forward pass failed; shared by the requests of a batch
    │       ├── OutOfDeviceMemoryError   ... for want of memory: a smaller batch may work
    │       └── LostDeviceError          ... and every later one of this process will; the run ends
    ├── SchedulerClosedError (RuntimeError)  a request met a scheduler that was shut down
    ├── OutputError                      a result file cannot be written, read or trusted
    │   └── OutputMismatchError          a file or part is there, made otherwise
    ├── SubmitError                      a batch system is not there, or did not take the job
    └── StoppedError                     the run was told to stop; what was done is on disk

A message names the slide or file, the fact and the next step. The command line prints it as one
line; the traceback is for ``--verbose``.
"""

import errno
import traceback


class BioptimusError(Exception):
    """Base of every error raised on purpose by this package."""


class UsageError(BioptimusError, ValueError):
    """Options that contradict each other or the input given, or a value of another kind."""


class SlideError(BioptimusError):
    """One slide cannot be processed."""


class SlideOpenError(SlideError):
    """The file is missing, empty, truncated, of an unsupported kind, or not a slide."""


class ResolutionError(SlideError, ValueError):
    """The slide's µm/px is unknown or implausible, or coarser or far finer than the tile's."""


class SlideReadError(SlideError):
    """Pixels could not be decoded, also after the slide was opened again."""


class TissueError(SlideError):
    """A tissue mask cannot be read or does not fit the slide."""


class RequestError(BioptimusError, ValueError):
    """One request is malformed. Only the caller who made it sees this."""


class ModelError(BioptimusError):
    """A model cannot be loaded or run."""


class CheckpointError(ModelError, ValueError):
    """A ``.pt2`` file is missing, truncated, foreign, or made for another device."""


class NoCheckpointError(CheckpointError, UsageError):
    """There is no file where a ``.pt2`` was named: a slip of the command line, not damage."""


class _ForwardError(ModelError, RuntimeError):
    """A forward pass failed; every request of that batch gets this."""


class OutOfDeviceMemoryError(_ForwardError):
    """A forward pass ran out of memory; the same tiles may fit in smaller batches."""


class LostDeviceError(_ForwardError):
    """The device failed in a way that no later pass of this process survives."""


class SchedulerClosedError(BioptimusError, RuntimeError):
    """A request met a scheduler that has been shut down."""


class OutputError(BioptimusError):
    """A result file cannot be written, read or trusted."""


class OutputMismatchError(OutputError):
    """A result file, finished or not, is there already, made from other inputs or parameters."""


class SubmitError(BioptimusError):
    """A batch system is not there, or did not take the job."""


class StoppedError(BioptimusError):
    """The run was told to stop. What had been computed is on disk."""


def in_our_words(error: BaseException) -> str | None:
    """What to tell of an error of Python's own that people can mend; None of any other."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return (
            "no further thread can be started: the user's limit of processes (ulimit -u), the "
            "container's, or that of memory is reached; raise it, or pass fewer --workers and "
            "--readers"
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "too many files are open: the limit of one process (ulimit -n), or the machine's, is "
            "reached; raise it, or pass fewer --workers"
        )
    return None


def release_frames(error: BaseException | None) -> None:
    """Let go of what an error's frames hold: the report of 100,000 slides keeps its errors."""
    while error is not None:
        trace = error.__traceback__
        traceback.clear_frames(trace)
        # An error of another thread is traced to where it was caught; the callers above that
        # hang on to its frames, with a batch of tiles among their variables.
        caller = trace.tb_frame.f_back if trace else None
        while caller is not None:
            try:
                caller.clear()
            except RuntimeError:
                break  # at work, as are all above it
            caller = caller.f_back
        error = error.__cause__ or error.__context__
