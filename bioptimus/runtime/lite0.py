"""The built-in model: EfficientNet-Lite0's middle stages, and six measures of the stain.

One forward pass of a uint8 tile gives an embedding (global means of the stages of 40, 80, 112
and 192 channels, ImageNet weights) and six plain measures that need no weights. General image
features: a baseline and a demo, not a pathology foundation model.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from bioptimus.errors import CheckpointError

# (expansion, channels, repeats, stride of the first, kernel) of each stage that is used; the
# network's last stage (320 channels) and head describe ImageNet classes and are left out.
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
)
FIRST_STAGE_READ = 2
BATCH_NORM_EPSILON = 1e-3

# Ruifrok & Johnston, "Quantification of histochemical staining by color deconvolution",
# Anal. Quant. Cytol. Histol. 23 (2001) 291-299: optical density of each stain in R, G, B.
# The third row, orthogonal to both, takes what is neither.
HAEMATOXYLIN = (0.65, 0.70, 0.29)
EOSIN = (0.07, 0.99, 0.11)


def _unmixing_rows() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Weights of the optical density in R, G, B that give haematoxylin and eosin."""
    stains = torch.tensor([HAEMATOXYLIN, EOSIN], dtype=torch.float64)
    stains = stains / stains.norm(dim=1, keepdim=True)
    residual = torch.linalg.cross(stains[0], stains[1])
    rows = torch.linalg.inv(torch.stack([*stains, residual / residual.norm()])).T
    return tuple(rows[0].tolist()), tuple(rows[1].tolist())


UNMIX = _unmixing_rows()

# A tile's threshold between nuclei and the rest is found in the tile itself (stain strength
# differs between laboratories) and held inside these haematoxylin densities: below the first
# lies eosinophilic stroma, above the second nothing but nuclei.
NUCLEAR_OD_RANGE = (0.28, 0.60)
THRESHOLD_STEPS = 6


class SameConv(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding, for inputs of even size."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, C', H / stride, W / stride)."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        total = kernel - stride if stride > 1 else kernel - 1
        before, after = total // 2, total - total // 2
        padded = functional.pad(input, (before, after, before, after)) if total else input
        return functional.conv2d(padded, self.weight, self.bias, self.stride, groups=self.groups)


class Block(nn.Module):
    """Inverted residual: widen, filter each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expand: int, kernel: int) -> None:
        super().__init__()
        hidden = inputs * expand
        widen = [nn.Conv2d(inputs, hidden, 1), nn.ReLU6()] if expand > 1 else []
        self.layers = nn.Sequential(
            *widen,
            SameConv(hidden, hidden, kernel, stride, groups=hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, C', H / stride, W / stride)."""
        result: torch.Tensor = self.layers(features)
        return features + result if self.residual else result


class Lite0(nn.Module):
    """uint8 tiles (N, H, W, 3) → measures (N, 6) and embedding (N, 424), both float32.

    H and W are multiples of 32. Batch normalisation is folded into the convolutions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = SameConv(3, 32, 3, 2)
        self.activation = nn.ReLU6()
        stages = []
        width = 32
        for expand, channels, repeats, stride, kernel in STAGES:
            blocks = []
            for number in range(repeats):
                step = stride if number == 0 else 1
                blocks.append(Block(width, channels, stride=step, expand=expand, kernel=kernel))
                width = channels
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)

    def forward(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (measures, embedding)."""
        rgb = tiles.permute(0, 3, 1, 2)
        return self.measures(rgb.contiguous().float()), self.embedding(rgb.float())

    def embedding(self, rgb: torch.Tensor) -> torch.Tensor:
        """RGB (N, 3, H, W) on the 0..255 scale → global means (N, 424)."""
        features = self.activation(self.stem((rgb - 127.0) / 128.0))
        means = []
        for number, stage in enumerate(self.stages):
            features = stage(features)
            if number >= FIRST_STAGE_READ:
                means.append(features.mean((2, 3)))
        return torch.cat(means, 1)

    def measures(self, rgb: torch.Tensor) -> torch.Tensor:
        """Six measures of a tile, in the order of ``LITE0_MEASURES``.

        - ``haematoxylin_od``, ``eosin_od``: mean optical density (decadic) of the stain after
          unmixing by the vectors of Ruifrok & Johnston, negative values as 0. 0 is glass,
          tissue has about 0.05 to 0.6; no colour gives more than 4.8 and 2.7.
        - ``nuclear_area_fraction``: share of pixels, 0..1, whose haematoxylin density, averaged
          over 3 x 3 pixels, exceeds the tile's own threshold between dark and light
          (Ridler & Calvard's iteration, held inside ``NUCLEAR_OD_RANGE``). An estimate: pen,
          pigment and folds count as nuclei.
        - ``brightness``: mean luma (Rec. 601), 0 black to 1 white.
        - ``saturation``: mean of (max - min) / max of R, G, B, 0 grey to 1 pure colour.
        - ``focus``: log10(1 + variance of the Laplacian of the luma on the 0..255 scale), 0 to
          about 6: below 1.5 where blurred or empty, 2 to 3.5 where sharp. Compare it between
          tiles of one scanner and one scale.

        Args:
            rgb: (N, 3, H, W), 0..255.

        Returns:
            (N, 6) float32.
        """
        red, green, blue = rgb.unbind(1)
        haematoxylin, eosin = self.stains(rgb)
        nuclear = self.nuclei(haematoxylin)
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        highest = torch.maximum(torch.maximum(red, green), blue)
        lowest = torch.minimum(torch.minimum(red, green), blue)
        laplacian = (
            luma[:, :-2, 1:-1]
            + luma[:, 2:, 1:-1]
            + luma[:, 1:-1, :-2]
            + luma[:, 1:-1, 2:]
            - 4.0 * luma[:, 1:-1, 1:-1]
        )
        return torch.stack(
            [
                haematoxylin.clamp(min=0.0).mean((1, 2)),
                eosin.clamp(min=0.0).mean((1, 2)),
                nuclear.float().mean((1, 2)),
                luma.mean((1, 2)) / 255.0,
                ((highest - lowest) / highest.clamp(min=1.0)).mean((1, 2)),
                torch.log10(1.0 + laplacian.var((1, 2), correction=0)),
            ],
            1,
        )

    def stains(self, rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RGB (N, 3, H, W) on the 0..255 scale → haematoxylin, eosin density, (N, H, W) each."""
        # Black has no logarithm; the darkest value above it stands for it.
        red, green, blue = (-torch.log10(rgb.clamp(min=1.0) / 255.0)).unbind(1)
        haematoxylin, eosin = (row[0] * red + row[1] * green + row[2] * blue for row in UNMIX)
        return haematoxylin, eosin

    def nuclei(self, haematoxylin: torch.Tensor) -> torch.Tensor:
        """Haematoxylin density (N, H, W) → which pixels are nuclei, bool, 1 px less all round."""
        averaged = functional.avg_pool2d(haematoxylin[:, None], 3, stride=1)[:, 0]
        sample = averaged[:, ::2, ::2]
        threshold = sample.mean((1, 2), keepdim=True)
        for _ in range(THRESHOLD_STEPS):
            dark = (sample > threshold).float()
            share = dark.mean((1, 2), keepdim=True)
            above = (sample * dark).mean((1, 2), keepdim=True) / share.clamp(min=1e-6)
            below = (sample * (1 - dark)).mean((1, 2), keepdim=True) / (1 - share).clamp(min=1e-6)
            threshold = (above + below) / 2
        return averaged > threshold.clamp(*NUCLEAR_OD_RANGE)


def lite0_from_weights(weights: Mapping[str, torch.Tensor]) -> Lite0:
    """Fold a state dict of the usual EfficientNet naming into the network.

    Args:
        weights: Names such as ``_conv_stem.weight``, ``_bn0.running_var`` and
            ``_blocks.3._depthwise_conv.weight``.

    Raises:
        CheckpointError: A weight is missing or has another shape.
    """
    model = Lite0()
    targets = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    try:
        for convolution, (source, norm) in zip(targets, _layer_names(), strict=True):
            _fold(convolution, weights, source=source, norm=norm)
    except (KeyError, RuntimeError) as exc:
        raise CheckpointError(f"EfficientNet-Lite0 weights do not fit: {exc}") from exc
    return model.eval()


def _layer_names() -> list[tuple[str, str]]:
    """(convolution, batch normalisation) in the order in which the network runs them."""
    names = [("_conv_stem", "_bn0")]
    number = 0
    for expand, _, repeats, _, _ in STAGES:
        for _ in range(repeats):
            block = f"_blocks.{number}."
            if expand > 1:
                names.append((block + "_expand_conv", block + "_bn0"))
            names.append((block + "_depthwise_conv", block + "_bn1"))
            names.append((block + "_project_conv", block + "_bn2"))
            number += 1
    return names


def _fold(
    convolution: nn.Conv2d, weights: Mapping[str, torch.Tensor], *, source: str, norm: str
) -> None:
    if convolution.bias is None:  # every convolution here has one; this tells the type checker
        raise RuntimeError(f"{source} has no bias")
    # In double precision, so that folding adds no error of its own.
    scale = weights[f"{norm}.weight"].double() / torch.sqrt(
        weights[f"{norm}.running_var"].double() + BATCH_NORM_EPSILON
    )
    kernel = weights[f"{source}.weight"].double() * scale[:, None, None, None]
    shift = weights[f"{norm}.bias"].double() - weights[f"{norm}.running_mean"].double() * scale
    with torch.no_grad():
        convolution.weight.copy_(kernel)
        convolution.bias.copy_(shift)
