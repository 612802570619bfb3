"""Published facts about pathology encoders, so that their weights can be exported.

Figures only; the weights are the user's, under their own licences. Read from model cards and
from public code that runs the models. ``verified`` says what was checked and what was not: the
gated weights themselves were never at hand, so every export compares itself with what the weights
say (shapes) and refuses keys it does not know.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bioptimus.errors import UsageError
from bioptimus.models.types import ModelSpec
from bioptimus.tiles import TileSpec

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_OPTIMUS_MEAN = (0.707223, 0.578729, 0.703617)
_OPTIMUS_STD = (0.211883, 0.230117, 0.177517)
_HIBOU_MEAN = (0.7068, 0.5755, 0.722)
_HIBOU_STD = (0.195, 0.2316, 0.1816)
_LUNIT_MEAN = (0.70322989, 0.53606487, 0.66096631)
_LUNIT_STD = (0.21716536, 0.26081574, 0.20723464)
_HALF = (0.5, 0.5, 0.5)

Positions = Literal["patches", "class_and_patches", "all"]


@dataclass(frozen=True, kw_only=True)
class VitShape:
    """A vision transformer of the usual (ViT, DINOv2) layout.

    Attributes:
        image_px: Side of the input image.
        patch_px: Side of a patch.
        width: Length of a token.
        depth: Number of blocks.
        heads: Attention heads.
        hidden: Outputs of a block's first linear layer; half of them reach the second if gated.
        gated: SwiGLU (SiLU of one half times the other) instead of GELU.
        registers: Register tokens behind the class token.
        layer_scale: Whether each branch is scaled by a learned vector.
        positions: What the position embedding covers.
        epsilon: Of the layer normalisations.
    """

    image_px: int = 224
    patch_px: int
    width: int
    depth: int
    heads: int
    hidden: int
    gated: bool = False
    registers: int = 0
    layer_scale: bool = True
    positions: Positions = "class_and_patches"
    epsilon: float = 1e-6

    @property
    def prefix_tokens(self) -> int:
        """Class and register tokens."""
        return 1 + self.registers


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an export must know about a model.

    Attributes:
        key: Name here, as in ``--as KEY``.
        title: Name people know.
        repository: On the Hugging Face hub.
        licence: Of the weights.
        mean: Per channel on the 0..1 scale.
        std: Per channel on the 0..1 scale.
        dim: Length of the embedding after pooling.
        pooling: ``cls``, ``mean``, ``cls_mean``, or ``none`` where the network pools itself.
        timm_name: Architecture in timm; empty where timm has none that fits.
        timm_args: Arguments of ``timm.create_model``; layer classes by their name in timm or torch.
        vit: The same as a plain shape, which needs no timm; None for other architectures.
        verified: What was checked here, and what was not.
        tile_px: Side of the tile.
        mpp: Scale of the tile in µm per pixel.
        interpolation: How tiles were resized in training.
    """

    key: str
    title: str
    repository: str
    licence: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    dim: int
    pooling: str = "cls"
    timm_name: str = ""
    timm_args: Mapping[str, Any] = field(default_factory=dict)
    vit: VitShape | None = None
    verified: str
    tile_px: int = 224
    mpp: float = 0.5
    interpolation: str = "bicubic"

    @property
    def architecture(self) -> str:
        """Such as ``ViT 1536 x 40, patch 14, 4 registers``."""
        if self.vit is None:
            return self.timm_name or "its own code; export it from a Python function"
        text = f"ViT {self.vit.width} x {self.vit.depth}, patch {self.vit.patch_px}"
        return text + (f", {self.vit.registers} registers" if self.vit.registers else "")

    def spec(self) -> ModelSpec:
        """The specification that the exported file will carry."""
        return ModelSpec(
            name=self.key,
            licence=self.licence,
            tile=TileSpec(size_px=self.tile_px, mpp=self.mpp),
            mean=self.mean,
            std=self.std,
            interpolation=self.interpolation,
            architecture=self.architecture,
            embedding_dim=self.dim,
            prefix_tokens=self.vit.prefix_tokens if self.vit else 0,
            pooling=self.pooling,
            description=self.title,
            source=self.repository,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready types."""
        return asdict(self)


_SWIGLU = {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU"}
_TIMM = (
    "two blocks with random weights exported and compared with timm 1.0.31; the full shape has "
    "timm's parameters, in the stated number"
)
_TRANSFORMERS = (
    "two blocks with random weights, saved by it, exported and compared with the transformers "
    "library 5.24; the full shape has the stated number of parameters"
)
_NOT_WEIGHTS = "; the weights are gated and were not loaded"

_VIT_G = VitShape(
    patch_px=14, width=1536, depth=40, heads=24, hidden=8192, gated=True, registers=4,
    positions="patches",
)  # fmt: skip
_VIT_H = VitShape(patch_px=14, width=1280, depth=32, heads=16, hidden=6832, gated=True)
_VIT_L = VitShape(patch_px=16, width=1024, depth=24, heads=16, hidden=4096)
_VIT_B = VitShape(patch_px=16, width=768, depth=12, heads=12, hidden=3072, layer_scale=False)
_VIT_S = VitShape(patch_px=16, width=384, depth=12, heads=6, hidden=1536, layer_scale=False)


def _with(shape: VitShape, **changes: Any) -> VitShape:
    return VitShape(**{**asdict(shape), **changes})


_TABLE = (
    Facts(
        key="h0", title="H-optimus-0", repository="bioptimus/H-optimus-0", licence="Apache-2.0",
        mean=_OPTIMUS_MEAN, std=_OPTIMUS_STD, dim=1536, vit=_VIT_G,
        timm_name="vit_giant_patch14_reg4_dinov2",
        timm_args={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="h0-mini", title="H0-mini", repository="bioptimus/H0-mini",
        licence="gated, non-commercial", mean=_OPTIMUS_MEAN, std=_OPTIMUS_STD, dim=768,
        vit=VitShape(patch_px=14, width=768, depth=12, heads=12, hidden=4096, gated=True,
                     registers=4, positions="patches"),
        timm_name="vit_base_patch14_reg4_dinov2",
        timm_args={"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.33334, **_SWIGLU},
        verified=_TIMM + "; the hidden width (4096) follows from the stated 86 M parameters"
        + _NOT_WEIGHTS,
    ),
    Facts(
        key="h1", title="H-optimus-1", repository="bioptimus/H-optimus-1",
        licence="gated, non-commercial", mean=_OPTIMUS_MEAN, std=_OPTIMUS_STD, dim=1536,
        vit=_VIT_G, timm_name="vit_giant_patch14_reg4_dinov2",
        timm_args={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="uni", title="UNI", repository="MahmoodLab/UNI", licence="CC-BY-NC-ND-4.0",
        mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=1024, vit=_VIT_L, interpolation="bilinear",
        timm_name="vit_large_patch16_224",
        timm_args={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": True},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="uni2-h", title="UNI2-h", repository="MahmoodLab/UNI2-h", licence="CC-BY-NC-ND-4.0",
        mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=1536, interpolation="bilinear",
        vit=_with(_VIT_G, depth=24, registers=8), timm_name="vit_giant_patch14_224",
        timm_args={"img_size": 224, "depth": 24, "num_heads": 24, "init_values": 1e-5,
                   "embed_dim": 1536, "mlp_ratio": 5.33334, "no_embed_class": True,
                   "reg_tokens": 8, "dynamic_img_size": True, **_SWIGLU},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="virchow", title="Virchow", repository="paige-ai/Virchow", licence="Apache-2.0",
        mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=2560, pooling="cls_mean", vit=_VIT_H,
        timm_name="vit_huge_patch14_224",
        timm_args={"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.3375, "global_pool": "",
                   "dynamic_img_size": True, **_SWIGLU},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="virchow2", title="Virchow2", repository="paige-ai/Virchow2",
        licence="CC-BY-NC-ND-4.0", mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=2560,
        pooling="cls_mean", vit=_with(_VIT_H, registers=4, positions="all"),
        timm_name="vit_huge_patch14_224",
        timm_args={"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.3375, "global_pool": "",
                   "reg_tokens": 4, "dynamic_img_size": True, **_SWIGLU},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="gigapath", title="Prov-GigaPath tile encoder",
        repository="prov-gigapath/prov-gigapath", licence="Apache-2.0",
        mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=1536,
        vit=_with(_VIT_G, patch_px=16, registers=0, positions="class_and_patches"),
        timm_name="vit_giant_patch14_dinov2",
        timm_args={"img_size": 224, "patch_size": 16, "init_values": 1e-5, "mlp_ratio": 5.33334,
                   "dynamic_img_size": True},
        verified=_TIMM + "; its authors cut the middle 224 px out of tiles of 256 px at 0.5 "
        "um/px, which are tiles of 224 px here" + _NOT_WEIGHTS,
    ),
    Facts(
        key="phikon", title="Phikon", repository="owkin/phikon",
        licence="Owkin non-commercial", mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=768,
        vit=_with(_VIT_B, epsilon=1e-12), interpolation="bilinear",
        verified=_TRANSFORMERS + _NOT_WEIGHTS,
    ),
    Facts(
        key="phikon-v2", title="Phikon-v2", repository="owkin/phikon-v2",
        licence="Owkin non-commercial", mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=1024,
        vit=_VIT_L,
        verified=_TRANSFORMERS + _NOT_WEIGHTS,
    ),
    Facts(
        key="conch", title="CONCH, image tower", repository="MahmoodLab/CONCH",
        licence="CC-BY-NC-ND-4.0", mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711), dim=512, pooling="none", tile_px=448,
        verified="not buildable by timm (its attentional pooling is not timm's): export it from "
        "a Python function that uses its own package; not compared with it, figures not checked",
    ),
    Facts(
        key="hibou-b", title="Hibou-B", repository="histai/hibou-b", licence="Apache-2.0",
        mean=_HIBOU_MEAN, std=_HIBOU_STD, dim=768,
        vit=VitShape(patch_px=14, width=768, depth=12, heads=12, hidden=3072, registers=4),
        verified=_TRANSFORMERS + "; GELU or SwiGLU is read from the weights, which were not "
        "loaded here",
    ),
    Facts(
        key="hibou-l", title="Hibou-L", repository="histai/hibou-L", licence="Apache-2.0",
        mean=_HIBOU_MEAN, std=_HIBOU_STD, dim=1024,
        vit=_with(_VIT_L, patch_px=14, registers=4),
        verified=_TRANSFORMERS + "; GELU or SwiGLU is read from the weights, which were not "
        "loaded here",
    ),
    Facts(
        key="kaiko-s16", title="Kaiko ViT-S/16",
        repository="1aurent/vit_small_patch16_224.kaiko_ai_towards_large_pathology_fms",
        licence="kaiko-non-commercial", mean=_HALF, std=_HALF, dim=384, vit=_VIT_S,
        interpolation="bilinear", timm_name="vit_small_patch16_224",
        timm_args={"img_size": 224, "dynamic_img_size": True}, verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="kaiko-s8", title="Kaiko ViT-S/8",
        repository="1aurent/vit_small_patch8_224.kaiko_ai_towards_large_pathology_fms",
        licence="kaiko-non-commercial", mean=_HALF, std=_HALF, dim=384,
        vit=_with(_VIT_S, patch_px=8), interpolation="bilinear", timm_name="vit_small_patch8_224",
        timm_args={"img_size": 224, "dynamic_img_size": True}, verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="kaiko-b16", title="Kaiko ViT-B/16",
        repository="1aurent/vit_base_patch16_224.kaiko_ai_towards_large_pathology_fms",
        licence="kaiko-non-commercial", mean=_HALF, std=_HALF, dim=768, vit=_VIT_B,
        interpolation="bilinear", timm_name="vit_base_patch16_224",
        timm_args={"img_size": 224, "dynamic_img_size": True}, verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="kaiko-b8", title="Kaiko ViT-B/8",
        repository="1aurent/vit_base_patch8_224.kaiko_ai_towards_large_pathology_fms",
        licence="kaiko-non-commercial", mean=_HALF, std=_HALF, dim=768,
        vit=_with(_VIT_B, patch_px=8), interpolation="bilinear", timm_name="vit_base_patch8_224",
        timm_args={"img_size": 224, "dynamic_img_size": True}, verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="kaiko-l14", title="Kaiko ViT-L/14",
        repository="1aurent/vit_large_patch14_reg4_224.kaiko_ai_towards_large_pathology_fms",
        licence="kaiko-non-commercial", mean=_HALF, std=_HALF, dim=1024,
        vit=_with(_VIT_L, patch_px=14, registers=4, positions="patches"),
        interpolation="bilinear", timm_name="vit_large_patch14_reg4_dinov2",
        timm_args={"img_size": 224, "dynamic_img_size": True},
        verified=_TIMM + "; positions stored for 518 px are resampled" + _NOT_WEIGHTS,
    ),
    Facts(
        key="lunit-s16", title="Lunit DINO ViT-S/16",
        repository="1aurent/vit_small_patch16_224.lunit_dino",
        licence="Lunit, non-commercial", mean=_LUNIT_MEAN, std=_LUNIT_STD, dim=384, vit=_VIT_S,
        timm_name="vit_small_patch16_224", timm_args={"img_size": 224, "dynamic_img_size": True},
        verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="lunit-s8", title="Lunit DINO ViT-S/8",
        repository="1aurent/vit_small_patch8_224.lunit_dino",
        licence="Lunit, non-commercial", mean=_LUNIT_MEAN, std=_LUNIT_STD, dim=384,
        vit=_with(_VIT_S, patch_px=8), timm_name="vit_small_patch8_224",
        timm_args={"img_size": 224, "dynamic_img_size": True}, verified=_TIMM + _NOT_WEIGHTS,
    ),
    Facts(
        key="ctranspath", title="CTransPath", repository="X-zhangyang/TransPath",
        licence="GPL-3.0", mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=768, pooling="none",
        interpolation="bilinear",
        verified="not buildable by timm (a Swin-T with a stem of its own on an altered timm): "
        "export it from a Python function; not compared with it, figures not checked",
    ),
    Facts(
        key="resnet50", title="ResNet-50, ImageNet", repository="timm/resnet50.tv_in1k",
        licence="BSD-3-Clause", mean=IMAGENET_MEAN, std=IMAGENET_STD, dim=2048, pooling="none",
        interpolation="bilinear", timm_name="resnet50",
        verified="exported through timm, at reduced depth with random weights, and compared with "
        "timm 1.0.31",
    ),
)  # fmt: skip

FACTS: dict[str, Facts] = {facts.key: facts for facts in _TABLE}
"""Key → facts."""


def get_facts(key: str) -> Facts:
    """The facts under a key.

    Raises:
        UsageError: There are none.
    """
    try:
        return FACTS[key]
    except KeyError:
        raise UsageError(f"{key}: no facts about it; known are {', '.join(FACTS)}") from None
