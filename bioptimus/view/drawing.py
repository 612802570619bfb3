"""Pictures for scripts and notebooks: ``draw(result, "clusters", count=6)``."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, Literal

from bioptimus.errors import UsageError
from bioptimus.kinds import checks_kinds
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

    @checks_kinds
    def save(self, path: Path | str) -> Path:
        """Write it; the suffix says the format: png, svg or pdf.

        Raises:
            OutputError: The file cannot be written.
            UsageError: The suffix is none of a picture's.
        """
        path = Path(path)
        if path.suffix and path.suffix[1:] not in self.figure.canvas.get_supported_filetypes():
            raise UsageError(f"{path}: no format of a picture; end the name in .png, .svg or .pdf")
        figures.save(self.figure, path, self.options)
        return path

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        figures.render(self.figure, buffer, format="png", dpi=self.options.dpi)
        return buffer.getvalue()


@checks_kinds
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
        **options: As the picture takes them; the numbers of rows count from 0, in plan order.

    Returns:
        The picture, which shows itself in a notebook and can be saved.

    Raises:
        UsageError: matplotlib is missing, the file does not hold what the picture needs, or a
            value is of another kind.
        OutputError: The result file cannot be read.
    """
    figures.check_installed()
    # Each picture checks what its options are; a type checker cannot follow the choice.
    function: Any = _DRAW[picture]
    _check_names(picture, function, options)
    if isinstance(result, Path | str):
        source = open_source(Path(result))
    else:
        from bioptimus.inference.results import Result

        if not isinstance(result, Result):
            raise UsageError(f"result {shown(result)}: must be an opened result or a path")
        source = source_of(result)
    found = find_slide(source, None if slide is None else Path(slide))
    chosen = PictureOptions(width_px=width_px, slide=found)
    return Drawing(figure=function(source, chosen, **options), options=chosen)


def _check_names(picture: str, function: Any, given: Mapping[str, Any]) -> None:
    """Refuse options that a picture does not take, and the want of one that it needs."""
    takes = {
        name: each
        for name, each in signature(function).parameters.items()
        if each.kind is Parameter.KEYWORD_ONLY
    }
    words = ", ".join(takes) or "none"
    for name in given:
        if name not in takes:
            raise UsageError(f"{name}: {picture} has no such option; its options are {words}")
    for name, each in takes.items():
        if each.default is Parameter.empty and name not in given:
            raise UsageError(f"{picture} needs the option {name}; its options are {words}")
