"""How many threads do what, chosen from the cores."""

from dataclasses import dataclass

from bioptimus.runtime.machine import available_cores

# A slide that opens, finds its tissue or ends leaves the model to another one meanwhile.
_MIN_WORKERS = 2
MAX_WORKERS = 8
# Blocks of tiles of all slides that are being read or wait for the model: 5 MiB each.
_MOST_BLOCKS = 48
# A slide's scheduler has this many batches under way.
_PASSES_PER_SLIDE = 2


@dataclass(frozen=True, kw_only=True)
class ThreadPlan:
    """Threads of a run.

    Attributes:
        workers: Slides under way at once.
        readers: Threads that read tiles, shared by all slides.
        passes: Forward passes that may run side by side.
        threads: Threads inside one forward pass.
    """

    workers: int
    readers: int
    passes: int
    threads: int

    @property
    def readers_per_slide(self) -> int:
        """Readers that one slide may keep busy; all of them, unless many slides are under way."""
        return max(1, min(self.readers, _MOST_BLOCKS // self.workers))

    @property
    def openers_per_slide(self) -> int:
        """Threads that open one slide and make its coarse pictures, its worker included.

        The readers' share of it: more of them, beside other slides under way, cost a few percent.
        """
        return max(1, self.readers // self.workers)


def plan_threads(
    *,
    on_cpu: bool,
    slides: int,
    workers: int | None = None,
    readers: int | None = None,
    threads: int | None = None,
    cores: int | None = None,
) -> ThreadPlan:
    """Choose what the user left open.

    On a CPU, single-threaded passes side by side beat one pass on many threads: OpenMP's
    threads wait busily for each other whenever a reader holds a core.

    Args:
        on_cpu: Whether the model runs on the CPU.
        slides: Slides to process.
        workers: The user's wish, or None.
        readers: The user's wish, or None.
        threads: The user's wish for threads inside one pass, or None.
        cores: Cores to plan for; those of this process if not given.
    """
    count = cores or available_cores()
    under_way = slides_under_way(slides, workers, cores=count)
    passes = min(count, _PASSES_PER_SLIDE * under_way)
    if not on_cpu:
        inside = threads or 1
    elif threads is None:
        inside = max(1, count // passes)
    else:
        inside = threads
        passes = max(1, min(passes, count // threads))
    return ThreadPlan(
        workers=under_way, readers=readers or max(2, count), passes=passes, threads=inside
    )


def slides_under_way(slides: int, workers: int | None = None, *, cores: int | None = None) -> int:
    """Slides that are under way at once, wherever the model runs.

    Args:
        slides: Slides to process.
        workers: The user's wish, or None.
        cores: As for :func:`plan_threads`.
    """
    count = cores or available_cores()
    return max(1, min(workers or max(_MIN_WORKERS, min(count // 2, MAX_WORKERS)), slides))
