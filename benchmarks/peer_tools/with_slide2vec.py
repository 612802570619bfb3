"""slide2vec with the near-free model, written to its README, with its own defaults.

An encoder registered by name, then ``embed_slide`` for one slide or a ``Pipeline`` for several.
"""

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from hs2p import TilingConfig
from jobs import MPP, TILE_PX, answer
from near_free_module import NearFree
from slide2vec import (
    ExecutionOptions,
    Model,
    Pipeline,
    PreprocessingConfig,
    TorchTileEncoder,
    register_encoder,
)
from torchvision.transforms import v2


@register_encoder(
    "near-free",
    encode_dim=16,
    input_size=TILE_PX,
    supports_variable_input_size=False,
    supported_spacing_um=None,
    default_spacing_um=MPP,
    precision="fp32",
)
class Encoder(TorchTileEncoder):
    """The cheapest that the interface allows: tiles reach the model as they were read."""

    def __init__(self, *, output_variant=None) -> None:
        super().__init__(
            NearFree(),
            encode_dim=16,
            input_size=TILE_PX,
            mean=(0, 0, 0),
            std=(1, 1, 1),
            output_variant=output_variant,
        )

    def get_transform(self):
        return v2.ToImage()

    def get_normalization_transform(self):
        return v2.ToImage()


MODEL = Model.from_preset("near-free")
PREPROCESSING = PreprocessingConfig(
    tiling=TilingConfig(
        requested_spacing_um=MPP, requested_tile_size_px=TILE_PX, tolerance=0.05, overlap=0.0
    )
)


def embed(slides: list[str], out: Path) -> Callable[[], int]:
    execution = ExecutionOptions(output_dir=out)
    if len(slides) == 1:
        MODEL.embed_slide(slides[0], preprocessing=PREPROCESSING, execution=execution)
    else:
        manifest = out / "slides.csv"
        with manifest.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sample_id", "image_path"])
            table.writerows([Path(slide).stem, slide] for slide in slides)
        pipeline = Pipeline(model=MODEL, preprocessing=PREPROCESSING, execution=execution)
        pipeline.run(manifest_path=manifest)
    return lambda: sum(len(torch.load(path)) for path in out.glob("tile_embeddings/*.pt"))


if __name__ == "__main__":
    answer(embed)
