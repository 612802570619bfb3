"""The straight line a user would write: slide by slide, DataLoader, eager model, h5py at the end.

It reads the tiles of our plan, so that the same are compared. A search for tissue as people write
it, Otsu's threshold on the saturation of a thumbnail, may be added: its time counts, its result
does not.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import numpy.typing as npt
import openslide
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 48


class Tiles(Dataset[Any]):
    """Reads tiles with OpenSlide, one handle per loader process."""

    def __init__(self, slide: Path, coords: npt.NDArray[np.int64], side_level0: int) -> None:
        self._path, self._coords, self._side = slide, coords, side_level0
        self._slide: openslide.OpenSlide | None = None

    def __len__(self) -> int:
        return len(self._coords)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._slide is None:
            self._slide = openslide.OpenSlide(self._path)
        x, y = map(int, self._coords[index])
        # As people write it: the level nearest below, then PIL to the model's size.
        level = self._slide.get_best_level_for_downsample(self._side / 224)
        side = round(self._side / self._slide.level_downsamples[level])
        tile = self._slide.read_region((x, y), level, (side, side)).convert("RGB")
        if side != 224:
            tile = tile.resize((224, 224), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(tile))


def embed(
    slides: Sequence[Path],
    plans: Callable[[Path], tuple[npt.NDArray[np.int64], int]],
    network: nn.Module,
    out: Path,
    *,
    loader_processes: int,
    search: bool = False,
) -> int:
    """Embed slides one after another; returns the number of tiles."""
    count = 0
    for slide in slides:
        coords, side = plans(slide)
        if search:
            _otsu(slide)
        loader = DataLoader(
            Tiles(slide, coords, side), batch_size=BATCH, num_workers=loader_processes
        )
        features = []
        with torch.inference_mode():
            for batch in loader:
                answer = network(batch)
                features.append((answer[1] if isinstance(answer, tuple) else answer).numpy())
        with h5py.File(out / f"{slide.stem}.h5", "w") as file:
            file["features"] = np.concatenate(features)
            file["coords"] = coords
        count += len(coords)
    return count


def _otsu(path: Path) -> npt.NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        thumbnail = np.asarray(slide.get_thumbnail((1024, 1024)).convert("RGB"))
    saturation = cv2.cvtColor(thumbnail, cv2.COLOR_RGB2HSV)[..., 1]
    return np.asarray(cv2.threshold(saturation, 0, 255, cv2.THRESH_OTSU)[1], dtype=np.uint8)
