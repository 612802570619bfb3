"""LazySlide with the near-free model, written to its README, with its own defaults.

The argument is the number of processes that read tiles; its own default is 0.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import lazyslide
from jobs import MPP, TILE_PX, answer
from near_free_module import NearFree
from torchvision.transforms import v2

MODEL = NearFree().eval()


def embed(slides: list[str], out: Path) -> Callable[[], int]:
    tiles = 0
    for path in slides:
        slide = lazyslide.open_wsi(path)
        lazyslide.pp.find_tissues(slide)
        lazyslide.pp.tile_tissues(slide, TILE_PX, mpp=MPP)
        lazyslide.tl.feature_extraction(
            slide,
            MODEL,
            model_name="near-free",
            transform=v2.ToImage(),
            num_workers=int(sys.argv[1]),
            pbar=False,
        )
        slide.write(out / f"{Path(path).stem}.zarr")
        tiles += len(slide["tiles"])
    return lambda: tiles


if __name__ == "__main__":
    answer(embed)
