"""What a format makes of a result: pieces, each one file or folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.results import Result
from bioptimus.kinds import check_kinds

# Above this, writing every prediction as text into every tile makes files nobody can open.
MAX_DEFAULT_MEASUREMENTS = 64


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What the text formats write.

    Attributes:
        geometry: GeoJSON of the ``tiles``, or of the ``tissue`` outlines with their means.
        measurements: Names of predictions to write; all of them if empty.
    """

    geometry: Literal["tiles", "tissue"] = "tiles"
    measurements: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no format knows.

        Raises:
            UsageError: A value is of another kind.
        """
        check_kinds(self)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One output.

    Attributes:
        path: Where, below the output folder.
        write: Writes it to the path given, which is another one until it is whole.
        is_folder: It is a folder of files, as Zarr makes them.
    """

    path: PurePath
    write: Callable[[Path], None]
    is_folder: bool = False


def measured(result: Result, options: ConvertOptions) -> tuple[str, ...]:
    """Names of the predictions to write as measurements.

    Raises:
        UsageError: There are too many to write all unasked.
        OutputError: One was asked for that the result does not have.
    """
    if options.measurements:
        for name in options.measurements:
            if name not in result.output_names:
                some = ", ".join(result.output_names[:8]) or "none"
                raise OutputError(f"{result.path}: has no prediction {name!r} (it has {some} ...)")
        return options.measurements
    if result.prediction_dim > MAX_DEFAULT_MEASUREMENTS:
        raise UsageError(
            f"{result.path}: {result.prediction_dim} predictions are too many for this format; "
            "choose some with --measurement NAME"
        )
    return result.output_names


def missing_package(format_name: str, package: str, extra: str) -> UsageError:
    """The error that says what to install; it ends the conversion, being the same for each file."""
    return UsageError(
        f"{format_name} needs the package {package}: pip install 'bioptimus-wsi[{extra}]'"
    )
