"""Results in the formats of other tools: :func:`convert`.

Each format is a function from a result to the files it becomes (:class:`Piece`), written under
another name first and renamed when whole. The packages of the other side are imported only when
their format is asked for.
"""

from bioptimus.convert.pieces import ConvertOptions, Piece
from bioptimus.convert.run import FORMATS, Conversion, Converted, Format, convert

__all__ = [
    "FORMATS",
    "Conversion",
    "ConvertOptions",
    "Converted",
    "Format",
    "Piece",
    "convert",
]
