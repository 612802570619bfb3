"""Everything that a run is told."""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bioptimus.errors import UsageError
from bioptimus.jobs import SlideOptions
from bioptimus.kinds import check_kinds
from bioptimus.runtime.runners import check_device_name


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is told.

    Attributes:
        inputs: Slides, folders, globs, CSV tables, or ``-`` for a list on standard input.
        out: Folder for results; each goes to ``<out>/<model>/<folders>/<stem>.h5``.
        model: Registry key, or path of a self-describing ``.pt2``.
        checkpoint: ``.pt2`` for a registry key whose weights are the user's.
        sha256: Digest that the checkpoint must have.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; several with commas for
            `bioptimus.batch.devices.run_on_devices`.
        batch_size: Most tiles in one forward pass; None: 48, but on a CPU 4 for
            each thread of a pass, unless the model has less than a megabyte;
            ``auto``: the largest that fits and makes the model faster, found by trying.
        max_wait_ms: How long a part-filled batch waits, from the arrival of its oldest tile.
        workers: Slides under way at once; None: chosen from the cores.
        readers: Threads that read tiles, shared by all slides; None: chosen from the cores.
        threads: Threads inside one forward pass on a CPU; None: chosen.
        shard: ``i/n``, ``auto``, or None for every slide.
        stage: Folder on fast storage to copy slides to before reading; as ``$TMPDIR`` it is looked
            up where the run is.
        stage_gb: Most gigabytes staged at once.
        fail_fast: Stop at the first failed slide.
        bulk_rna: Table of TPM values for every slide that the inputs name none for.
        slide: How each slide is processed.
        command: Words of the command line, for the report.
    """

    inputs: tuple[str, ...]
    out: Path
    model: str = "lite0"
    checkpoint: Path | None = None
    sha256: str | None = None
    device: str = "auto"
    batch_size: int | Literal["auto"] | None = None
    max_wait_ms: float = 30.0
    workers: int | None = None
    readers: int | None = None
    threads: int | None = None
    shard: str | None = None
    stage: Path | None = None
    stage_gb: float = 100.0
    fail_fast: bool = False
    bulk_rna: Path | None = None
    slide: SlideOptions = field(default_factory=SlideOptions)
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no machine can do.

        Raises:
            UsageError: The device is none, a number is too small, no room is left for staged
                slides, or a value is of another kind.
        """
        for each in fields(self):
            object.__setattr__(self, each.name, _plain(getattr(self, each.name)))
        check_kinds(self)
        for device in self.devices:
            if device != "auto":
                check_device_name(device)
        for what in ("batch_size", "workers", "readers", "threads"):
            number = getattr(self, what)
            if number not in (None, "auto") and number < 1:
                raise UsageError(f"{what.replace('_', ' ')} {number}: must be at least 1")
        if not 0 <= self.max_wait_ms < math.inf:
            raise UsageError(f"max wait {self.max_wait_ms} ms: must be 0 or more")
        if not self.stage_gb > 0:
            raise UsageError(f"--stage-gb {self.stage_gb:g}: must be above 0")

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices named, one process each where there are several.

        Raises:
            UsageError: There is none.
        """
        names = tuple(name.strip() for name in self.device.split(",") if name.strip())
        if not names:
            raise UsageError(f"--device {self.device!r} names no device")
        return names


def _plain(value: Any) -> Any:
    """An option, or options, with Python's own numbers, which files and their digest hold.

    In a script they may be numpy's, such as a cell of a table.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _plain(getattr(value, f.name)) for f in fields(value)})
    return value.item() if isinstance(value, np.generic) else value
