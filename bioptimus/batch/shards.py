"""Deal the slides of a run out to several jobs, so that all jobs end at about the same time."""

import heapq
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bioptimus.batch.batch_system import array_task
from bioptimus.batch.inputs import SlideInput
from bioptimus.errors import UsageError

# Opening a slide, finding its tissue and closing its file take about as long as this much of
# reading; it also keeps a thousand tiny slides from all going to one job.
OVERHEAD_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One job's share: number ``index`` (from 1) of ``count``."""

    index: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a share that does not exist.

        Raises:
            UsageError: ``index`` is not in 1..``count``.
        """
        if not 1 <= self.index <= self.count:
            raise UsageError(
                f"--shard {self.index}/{self.count}: the first number must be 1 to {self.count}"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """Read ``i/n``, counted from 1, or ``auto``: this task's place in its array job.

    Args:
        text: What the user gave.
        environment: Where ``auto`` finds the variables of SLURM, Grid Engine or LSF.

    Raises:
        UsageError: Neither form, out of range, no array to be seen, or an array with gaps.
    """
    if text.strip().lower() == "auto":
        return _own_shard(environment)
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text, flags=re.ASCII)
    if match is None:
        raise UsageError(f"--shard {text}: give i/n, such as 1/8 for the first of 8, or auto")
    return Shard(index=int(match[1]), count=int(match[2]))


def _own_shard(environment: Mapping[str, str]) -> Shard:
    try:
        task = array_task(environment)
    except ValueError as exc:
        raise UsageError(f"--shard auto: an array variable is no number: {exc}") from exc
    if task is None:
        raise UsageError(
            "--shard auto: this is no array job (SLURM_ARRAY_TASK_ID is not set); "
            "pass i/n, such as --shard 1/8"
        )
    if task.count is None:
        raise UsageError(
            f"--shard auto: {task.variable} does not say how many tasks there are; "
            f"pass i/n, such as --shard ${task.variable}/8"
        )
    place, remainder = divmod(task.number - task.first, task.step)
    end = task.first + (task.count - 1) * task.step
    has_gaps = task.last is not None and task.last != end
    if remainder or has_gaps or not 0 <= place < task.count:
        # Part of an array that was submitted again: the other tasks' slides would be left out.
        raise UsageError(
            f"--shard auto: {task.variable} is {task.number}, but the array's {task.count} tasks "
            f"do not follow each other from {task.first} on; submit the whole array again, "
            "or pass i/n"
        )
    return Shard(index=place + 1, count=task.count)


def share(slides: Sequence[SlideInput], shard: Shard) -> tuple[SlideInput, ...]:
    """Return the slides of one shard, in the order given.

    Every job that is given the same slides, in any order, deals them out alike: the largest
    first, each to the job with the least to do. The fullest job has at most a third more than
    it would have in the best possible dealing.

    Args:
        slides: All slides of the run.
        shard: Which share to return.

    Returns:
        May be empty, when there are fewer slides than jobs.
    """
    sizes = {id(slide): slide.size() + OVERHEAD_BYTES for slide in slides}
    loads = [(0, number) for number in range(shard.count)]
    mine = set()
    for slide in sorted(slides, key=lambda s: (-sizes[id(s)], s.relative.as_posix(), str(s.path))):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[id(slide)], number))
        if number == shard.index - 1:
            mine.add(id(slide))
    return tuple(slide for slide in slides if id(slide) in mine)
