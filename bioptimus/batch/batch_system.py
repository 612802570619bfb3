"""What a batch system says about the job this process runs in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# SLURM's array tasks have a job number each, which nobody knows them by; name those 12_3.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


@dataclass(frozen=True, kw_only=True)
class ArrayTask:
    """Place of this task in its array job.

    Attributes:
        number: The task's number as the batch system counts.
        first: The lowest number of the array.
        step: Distance between neighbouring numbers.
        count: How many tasks the array has; None where the batch system does not say.
        last: The highest number of the array; None where the batch system does not say.
        variable: The variable that gave the number, for messages.
    """

    number: int
    first: int
    step: int
    count: int | None
    variable: str
    last: int | None = None


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the job's id as its user knows it, such as ``4711`` or ``4711_3``; None outside."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    found = (environment[name] for name in _JOB_VARIABLES if environment.get(name))
    return next(found, None)


def array_task(environment: Mapping[str, str] = os.environ) -> ArrayTask | None:
    """Read the array variables of SLURM, Grid Engine, LSF or PBS; None outside an array.

    Raises:
        ValueError: A variable is set to something that is no number.
    """

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text else default

    if environment.get("SLURM_ARRAY_TASK_ID"):
        count = number("SLURM_ARRAY_TASK_COUNT", 0)
        return ArrayTask(
            number=number("SLURM_ARRAY_TASK_ID", 0),
            first=number("SLURM_ARRAY_TASK_MIN", 0),
            step=number("SLURM_ARRAY_TASK_STEP", 1),
            count=count or None,
            variable="SLURM_ARRAY_TASK_ID",
            last=number("SLURM_ARRAY_TASK_MAX", 0) or None,
        )
    # Grid Engine sets these to "undefined" in jobs that are no array.
    if environment.get("SGE_TASK_ID", "undefined") != "undefined":
        first, step = number("SGE_TASK_FIRST", 1), number("SGE_TASK_STEPSIZE", 1)
        return ArrayTask(
            number=number("SGE_TASK_ID", 0),
            first=first,
            step=step,
            count=(number("SGE_TASK_LAST", first) - first) // step + 1,
            variable="SGE_TASK_ID",
        )
    # LSF sets the index to 0 in jobs that are no array, and does not say where one begins.
    if number("LSB_JOBINDEX", 0):
        step = number("LSB_JOBINDEX_STEP", 1)
        last = number("LSB_JOBINDEX_END", 0)
        return ArrayTask(
            number=number("LSB_JOBINDEX", 0),
            first=1,
            step=step,
            count=(last - 1) // step + 1 if last else None,
            variable="LSB_JOBINDEX",
        )
    for name in ("PBS_ARRAY_INDEX", "PBS_ARRAYID"):
        if environment.get(name):
            return ArrayTask(number=number(name, 0), first=0, step=1, count=None, variable=name)
    return None
