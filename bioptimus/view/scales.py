"""Which values the colours of a heatmap span: those of one slide, or of several together."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from bioptimus.view.components import Floats

# A fold or an ink spot must not take the colours from the rest: the outermost hundredth at either
# end may saturate.
_PERCENTILES = (1.0, 99.0)

# Of more values every second is left out, and so on: the first of a hundred percentiles is then
# still right to two hundredths of one.
_MOST_VALUES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What predicted values are values of: those of one quantity can be compared.

    Attributes:
        model: Name of the model.
        name: Name of the predicted value.
    """

    model: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The values at either end of the colours, in the values' own unit.

    Attributes:
        low: First percentile of the values fitted on.
        high: Last percentile of them; above ``low`` even where nothing varies.
        slides: How many slides they are of.
    """

    low: float
    high: float
    slides: int = 1

    @classmethod
    def of(cls, values: Floats, *, slides: int = 1) -> Self:
        """The scale of some values, at least one."""
        low, high = (float(edge) for edge in np.percentile(values, _PERCENTILES))
        if high <= low:
            low, high = low - 0.5, low + 0.5
        return cls(low=low, high=high, slides=slides)


class ScaleFit:
    """Finds the scale of slides that come one after another; each weighs by its tiles.

    Holds evenly spaced values, half a million floats at most and those of one slide.
    """

    def __init__(self) -> None:
        self._held: list[Floats] = []
        self._step = 1
        self._slides = 0

    def add(self, values: Floats) -> None:
        """Take in one slide's values, (N,)."""
        self._slides += 1
        self._held.append(values[:: self._step].copy())
        while sum(map(len, self._held)) > _MOST_VALUES:
            self._held = [np.concatenate(self._held)[::2].copy()]
            self._step *= 2

    def scale(self) -> Scale | None:
        """What all of them span; None without any value."""
        values = np.concatenate(self._held) if self._held else np.zeros(0, np.float32)
        return Scale.of(values, slides=self._slides) if len(values) else None
