"""Whole-slide images to embeddings and predictions.

An independent implementation, not affiliated with Bioptimus. Importing this package loads
neither torch nor OpenSlide nor HDF5; its parts load what they need when they are used.
"""

__version__ = "0.1.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bioptimus.api import embed_slide
    from bioptimus.inference.results import open_result
    from bioptimus.view.drawing import draw

__all__ = ["__version__", "draw", "embed_slide", "open_result"]

# Name → module. Loaded when first used, so that `import bioptimus` stays light.
_LAZY = {
    "draw": "bioptimus.view.drawing",
    "embed_slide": "bioptimus.api",
    "open_result": "bioptimus.inference.results",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name when it is first used."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = getattr(import_module(_LAZY[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted({*globals(), *__all__})
