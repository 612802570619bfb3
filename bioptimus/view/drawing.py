"""Pictures for scripts and notebooks: ``draw(result, "clusters", count=6)``."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bioptimus.errors import UsageError
from bioptimus.view import figures
from bioptimus.view.page import PictureOptions
from bioptimus.view.source import find_slide, open_source, source_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bioptimus.inference.results import Result

PictureName = Literal["overview", "embedding", "prediction", "clusters", "nearest"]

_DRAW = {
    "overview": figures.draw_overview,
    "embedding": figures.draw_embedding,
    "prediction": figures.draw_prediction,
    "clusters": figures.draw_clusters,
    "nearest": figures.draw_nearest,
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture. Shows itself in a notebook.

    Attributes:
        figure: The matplotlib figure, to add to.
        options: Size it was made for.
    """

    figure: "Figure"
    options: PictureOptions

    def save(self, path: Path | str) -> Path:
        """Write it; the suffix says the format: png, svg or pdf.

        Raises:
            OutputError: The file cannot be written.
        """
        figures.save(self.figure, Path(path), self.options)
        return Path(path)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        figures.render(self.figure, buffer, format="png", dpi=self.options.dpi)
        return buffer.getvalue()


def draw(
    result: "Result | Path | str",
    picture: PictureName = "embedding",
    *,
    width_px: int = 1200,
    slide: Path | str | None = None,
    **options: Any,
) -> Drawing:
    """Draw one picture of a result.

    Args:
        result: An opened result, or the path of one.
        picture: ``overview``, ``embedding``, ``prediction`` (with ``column=NAME``),
            ``clusters`` (with ``count=K``) or ``nearest`` (with ``row=N`` and, if wanted,
            ``count``).
        width_px: Width in pixels; text and lines scale with it.
        slide: The slide, where it has moved; by default the path in the file is tried. Where there
            is none, one warning says so, and the thumbnail in the file has to do.
        **options: As the picture takes them.

    Raises:
        UsageError: matplotlib is missing, or the file does not hold what the picture needs.
        OutputError: The result file cannot be read.
    """
    figures.check_installed()
    if picture not in _DRAW:
        raise UsageError(f"picture {picture!r}: must be one of {', '.join(_DRAW)}")
    source = open_source(Path(result)) if isinstance(result, Path | str) else source_of(result)
    found = find_slide(source, None if slide is None else Path(slide))
    chosen = PictureOptions(width_px=width_px, slide=found)
    # Each picture checks its own options; a type checker cannot follow the choice.
    function: Any = _DRAW[picture]
    return Drawing(figure=function(source, chosen, **options), options=chosen)
