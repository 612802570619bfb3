"""What a slide's processing is told, and what it tells: job, options, report, listener."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from bioptimus.errors import UsageError
from bioptimus.io.wsi import OpenOptions
from bioptimus.kinds import check_kinds
from bioptimus.models.types import InferenceMode
from bioptimus.planning import PlanOptions

SlideState = Literal["ok", "skipped", "empty", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class SlideOptions:
    """How every slide of a run is processed.

    Attributes:
        mode: What the model is asked for.
        opening: How slides are opened and their scale is found.
        plan: Tile and tissue options.
        dtype: Stored type of embeddings and predictions.
        max_failed_tiles: Share of planned tiles that may fail before the slide does, 0..1.
        overwrite: Replace a finished file that was made otherwise, or is damaged, and what a
            stopped run of other parameters left.
        gene_column: Column of gene names in bulk RNA tables; found by its usual names if None.
        value_column: Column of TPM values in them; found by its usual names if None.
    """

    mode: InferenceMode = InferenceMode.EMBEDDING
    opening: OpenOptions = field(default_factory=OpenOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)
    dtype: Literal["float32", "float16"] = "float32"
    max_failed_tiles: float = 0.01
    overwrite: bool = False
    gene_column: str | None = None
    value_column: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no file can hold and no slide can satisfy.

        Raises:
            UsageError: The mode or the stored type is none, the share of tiles is not one, or a
                value is of another kind.
        """
        check_kinds(self)
        if not 0 <= self.max_failed_tiles <= 1:
            raise UsageError(f"max failed tiles {self.max_failed_tiles}: must be a share, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class SlideJob:
    """One slide to process and where its result goes.

    Attributes:
        path: The slide file.
        output: Final name of the result.
        name: What messages and the report call the slide.
        read_path: Where to read the pixels from, when that is a staged copy.
        mpp: µm/px that overrides the file's, for this slide.
        mask: Tissue mask for this slide.
        bulk_rna: Table of bulk RNA for models that read it.
        extra: Further columns of the input table, carried into the report.
        problem: Why the slide cannot be processed, as far as that is known without opening it;
            without its name.
    """

    path: Path
    output: Path
    name: str
    read_path: Path | None = None
    mpp: float | None = None
    mask: Path | None = None
    bulk_rna: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class Timings:
    """Where a slide's time went, in seconds: opening it, its plan, tiles, model, file, and all.

    ``read`` is summed over reader threads and ``forward`` over batches, so they may exceed the
    wall time. ``wait`` is how long a lane waited for the model's answers, on average over the
    lanes: near the total where the model is the bottleneck, small where reading is.
    """

    open: float = 0.0
    tissue: float = 0.0
    read: float = 0.0
    wait: float = 0.0
    forward: float = 0.0
    write: float = 0.0
    total: float = 0.0

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the wall time of a block to one of the fields."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)


@dataclass
class SlideReport:
    """What became of one slide.

    Attributes:
        slide: Path of the slide as given.
        state: ``ok``, ``skipped`` (done already, or another job's), ``empty`` (no tissue),
            ``failed``, or ``stopped`` (the run was told to stop; the part file resumes).
        reason: Why, where the state is not ``ok``.
        output: Path of the finished file; empty if there is none.
        tiles_planned: Tiles that the plan keeps, of a skipped slide those of its file; 0 where the
            slide did not come so far.
        tiles_done: Rows that the file or its part holds, those of earlier runs included.
        tiles_failed: Tiles that have no row, see ``failed_tiles`` of the file.
        tiles_resumed: Rows that were there before this run.
        mpp: (x, y) µm per level-0 pixel; None where the slide did not come so far.
        mpp_source: What told it.
        reader: What decoded the tiles: ``tiff``, ``openslide`` or ``tifffile``.
        warnings: What was remarkable about the slide, one sentence each.
        seconds: Where the time went.
        batches: Forward passes.
        batch_size: Most tiles of one pass at the slide's end.
        fill_share: Tiles over places of these passes, 0..1.
        extra: Further columns of the input table.
        error: What ended the slide, for callers in Python; not part of the written report.
    """

    slide: str
    state: SlideState = "failed"
    reason: str = ""
    output: str = ""
    tiles_planned: int = 0
    tiles_done: int = 0
    tiles_failed: int = 0
    tiles_resumed: int = 0
    mpp: tuple[float, float] | None = None
    mpp_source: str = ""
    reader: str = ""
    warnings: list[str] = field(default_factory=list)
    seconds: Timings = field(default_factory=Timings)
    batches: int = 0
    batch_size: int = 0
    fill_share: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def tiles_per_second(self) -> float:
        """Tiles computed in this run over the wall time of the slide."""
        computed = self.tiles_done - self.tiles_resumed
        return computed / self.seconds.total if self.seconds.total > 0 else 0.0


class SlideListener(Protocol):
    """Hears how a slide goes along; called from the slide's worker thread."""

    def slide_planned(self, job: SlideJob, *, tiles: int, resumed: int) -> None:
        """The plan stands: so many tiles, of which some are in the part file already."""

    def tiles_done(self, job: SlideJob, count: int) -> None:
        """So many more tiles are written or given up."""

    def note(self, job: SlideJob, message: str) -> None:
        """Something a user should see once."""


class StopSignal(Protocol):
    """What tells a slide to stop."""

    @property
    def stopped(self) -> bool:
        """Whether to stop reading."""
