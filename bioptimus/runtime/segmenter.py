"""Tissue by a segmentation model, in place of the search by stain."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.errors import OutOfDeviceMemoryError, TissueError, UsageError
from bioptimus.inference.schemas import ModelRequest
from bioptimus.kinds import checks_kinds
from bioptimus.models.types import InferenceMode, Models
from bioptimus.planning import TISSUE_MPP, CoarseImage
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.loader import choice_of, load_model

if TYPE_CHECKING:
    from bioptimus.runtime.server_model import BaseServerModel

# Neighbouring tiles share so much of their side; what lies nearer to a tile's edge than half of
# it is taken from the neighbour, which has seen what comes after.
SHARED_PART = 0.25
TILES_AT_ONCE = 4


class ModelSegmenter:
    """Calls a mask model tile by tile over a coarse image.

    May be called from several threads, as the model may. Memory is that of the result and of
    ``TILES_AT_ONCE`` tiles.
    """

    def __init__(self, model: "BaseServerModel") -> None:
        """Take a loaded model.

        Raises:
            UsageError: It gives no masks.
        """
        if model.model_spec.output_kind != "mask":
            raise UsageError(
                f"{model.model_name}: gives no tissue masks; pass a segmentation model"
            )
        self._model = model

    def __call__(self, coarse: CoarseImage) -> npt.NDArray[np.bool_]:
        """Find the tissue.

        Args:
            coarse: The whole slide at about ``TISSUE_MPP``.

        Returns:
            (height, width) true where the model says tissue: above 0.5 where all its values for the
            slide are from 0 to 1, else above 0, as logits are.

        Raises:
            TissueError: The model gave values that are no numbers.
        """
        height, width = coarse.opaque.shape
        scale = TISSUE_MPP / self._model.model_spec.tile.mpp
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = coarse.pixels
        if size != (width, height):
            resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
            pixels = np.asarray(resized, dtype=np.uint8)
        values = self._over(pixels)
        shares = values.min() >= 0 and values.max() <= 1
        found = (values > (0.5 if shares else 0.0)).astype(np.uint8)
        if size != (width, height):
            back = cv2.resize(found, (width, height), interpolation=cv2.INTER_NEAREST)
            found = np.asarray(back, dtype=np.uint8)
        return found > 0

    def _over(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The model's values over an image at its own scale."""
        side = self._model.model_spec.tile.size_px
        margin = int(side * SHARED_PART / 2)
        step = side - 2 * margin
        height, width = pixels.shape[:2]
        rows, columns = -(-height // step), -(-width // step)
        after = (rows * step - height + margin, columns * step - width + margin)
        # Mirrored, so that the slide's edge looks to the model like no edge.
        padded = np.pad(pixels, ((margin, after[0]), (margin, after[1]), (0, 0)), mode="symmetric")
        out = np.zeros((rows * step, columns * step), dtype=np.float32)
        places = [(row * step, column * step) for row in range(rows) for column in range(columns)]
        for start in range(0, len(places), TILES_AT_ONCE):
            part = places[start : start + TILES_AT_ONCE]
            tiles = [padded[top : top + side, left : left + side] for top, left in part]
            for (top, left), values in zip(part, self._values(tiles), strict=True):
                inner = values[margin : margin + step, margin : margin + step]
                out[top : top + step, left : left + step] = inner
        return out[:height, :width]

    def _values(self, tiles: list[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.float32]]:
        """(side, side) values of some tiles; in smaller batches where memory is short."""
        try:
            return self._pass(tiles)
        except OutOfDeviceMemoryError:
            if len(tiles) == 1:
                raise
        half = len(tiles) // 2
        return [*self._values(tiles[:half]), *self._values(tiles[half:])]

    def _pass(self, tiles: list[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.float32]]:
        requests = [
            ModelRequest.from_pixels(np.ascontiguousarray(tile), slide_name="", x=0, y=0)
            for tile in tiles
        ]
        samples = [self._model.prepare_sample(request) for request in requests]
        answers = self._model.forward_batch(samples, requests, InferenceMode.PREDICTION)
        side = self._model.model_spec.tile.size_px
        results = []
        for answer in answers:
            values = np.asarray(answer.output, dtype=np.float32)
            if not np.isfinite(values).all():
                raise TissueError(f"{self._model.model_name}: gave values that are no numbers")
            if values.shape != (side, side):
                resized = cv2.resize(values, (side, side), interpolation=cv2.INTER_LINEAR)
                values = np.asarray(resized, dtype=np.float32)
            results.append(values)
        return results


@checks_kinds
def open_segmenter(path: str | Path, *, device: str = "auto") -> ModelSegmenter:
    """Load a tissue model.

    Args:
        path: A ``.pt2`` that gives masks; one without a description is taken to be the
            registered ``tissue-seg``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.

    Raises:
        UsageError: The file is missing or gives no masks.
        CheckpointError: The file is damaged or not made for this machine.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such tissue model")
    info = inspect_archive(path)
    name = info.spec.name if info.spec else Models.TISSUE_SEG
    return ModelSegmenter(load_model(choice_of(name, info), device))
