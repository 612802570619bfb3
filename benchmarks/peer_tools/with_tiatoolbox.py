"""TIAToolbox with the near-free model: its feature extractor over whole slides, its own mask.

The argument is the number of processes that read tiles; its own default is 0.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr
from jobs import MPP, TILE_PX, answer
from near_free_module import NearFree
from tiatoolbox.models.engine.deep_feature_extractor import DeepFeatureExtractor
from tiatoolbox.models.models_abc import ModelABC


class Model(ModelABC):
    """The interface that the engine wants: batches as it read them, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.network = NearFree().eval()

    def forward(self, tiles):
        return self.network(tiles.permute(0, 3, 1, 2))

    @staticmethod
    def infer_batch(model, batch_data, *, device):
        return model(batch_data.to(device)).numpy(force=True)


LOADERS = int(sys.argv[1])
EXTRACTOR = DeepFeatureExtractor(Model(), batch_size=48, num_workers=LOADERS, verbose=False)
RESOLUTION = [{"units": "mpp", "resolution": MPP}]


def embed(slides: list[str], out: Path) -> Callable[[], int]:
    paths = EXTRACTOR.run(
        list(map(Path, slides)),
        patch_mode=False,
        save_dir=out / "features",
        output_type="zarr",
        input_resolutions=RESOLUTION,
        patch_input_shape=(TILE_PX, TILE_PX),
        stride_shape=(TILE_PX, TILE_PX),
        auto_get_mask=True,
        device="cpu",
    )
    return lambda: sum(len(np.asarray(zarr.open(path)["features"])) for path in paths.values())


if __name__ == "__main__":
    answer(embed)
