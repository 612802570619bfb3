"""A vision transformer of the DINOv2 layout, and its weights from a local folder.

Written here so that neither timm nor the transformers library, with all that they import, is
needed to run or export the common pathology encoders. Weights named by timm load as they are;
those named by the transformers library are translated.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from bioptimus.errors import CheckpointError
from bioptimus.models.facts import Positions, VitShape

Weights = dict[str, torch.Tensor]

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# No weights file has a header near this; a damaged length would ask for all memory.
_LARGEST_HEADER_BYTES = 100 << 20


class PatchEmbed(nn.Module):
    """Images (N, 3, H, W) → one token for each patch, (N, P, D), row by row."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch_px, shape.patch_px)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        result: torch.Tensor = self.proj(images)
        return result.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, T, D) → (N, T, D)."""
        count, length, width = tokens.shape
        parts = self.qkv(tokens).reshape(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        result: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(count, length, width))
        return result


class Mlp(nn.Module):
    """Two linear layers with GELU, or SwiGLU: SiLU of the first half times the second."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.gated = shape.gated
        self.fc1 = nn.Linear(shape.width, shape.hidden)
        self.fc2 = nn.Linear(shape.hidden // 2 if shape.gated else shape.hidden, shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, T, D) → (N, T, D)."""
        hidden = self.fc1(tokens)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = functional.silu(gate) * value
        else:
            hidden = functional.gelu(hidden)
        result: torch.Tensor = self.fc2(hidden)
        return result


class LayerScale(nn.Module):
    """A learned factor for each element of a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, T, D) → (N, T, D)."""
        return tokens * self.gamma


class Block(nn.Module):
    """Attention and MLP, each normalised before, scaled after, and added to what came in."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        scale = shape.layer_scale
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.attn = Attention(shape)
        self.ls1 = LayerScale(shape.width) if scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.mlp = Mlp(shape)
        self.ls2 = LayerScale(shape.width) if scale else nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, T, D) → (N, T, D)."""
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        result: torch.Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return result


class VisionTransformer(nn.Module):
    """Images (N, 3, H, W), normalised → tokens (N, T, D): class, registers, patches.

    Names of the parameters are timm's.
    """

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.shape = shape
        patches = (shape.image_px // shape.patch_px) ** 2
        covered = {
            "patches": patches,
            "class_and_patches": patches + 1,
            "all": patches + shape.prefix_tokens,
        }[shape.positions]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, covered, shape.width))
        self.patch_embed = PatchEmbed(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        tokens = self._place(self.patch_embed(images))
        for block in self.blocks:
            tokens = block(tokens)
        result: torch.Tensor = self.norm(tokens)
        return result

    def _place(self, patches: torch.Tensor) -> torch.Tensor:
        """Add class and register tokens and the position embedding, in the model's order."""
        count = patches.shape[0]
        prefix = [self.cls_token.expand(count, -1, -1)]
        registers = [self.reg_token.expand(count, -1, -1)] if self.shape.registers else []
        if self.shape.positions == "patches":
            return torch.cat([*prefix, *registers, patches + self.pos_embed], 1)
        if self.shape.positions == "all":
            return torch.cat([*prefix, *registers, patches], 1) + self.pos_embed
        placed = torch.cat([*prefix, patches], 1) + self.pos_embed
        return torch.cat([placed[:, :1], *registers, placed[:, 1:]], 1)


def vit_from_weights(
    weights: Mapping[str, torch.Tensor], *, heads: int, image_px: int, epsilon: float = 1e-6
) -> VisionTransformer:
    """Build the transformer that the weights fit, and load them, every one.

    Args:
        weights: Named by timm or by the transformers library (ViT, DINOv2, with registers).
        heads: Attention heads, which the shapes do not tell.
        image_px: Side of the input image; positions of another grid are resampled.
        epsilon: Of the layer normalisations.

    Raises:
        CheckpointError: Keys are missing or unknown, or it is another architecture.
    """
    named = to_timm_names(weights)
    try:
        shape = _shape_of(named, heads=heads, image_px=image_px, epsilon=epsilon)
        named["pos_embed"] = _fit_positions(named["pos_embed"], shape)
    except (KeyError, IndexError, ValueError) as exc:
        raise CheckpointError(f"not the weights of a plain vision transformer: {exc}") from exc
    with torch.device("meta"):
        model = VisionTransformer(shape)
    load_strictly(model, named)
    return model.eval()


def load_strictly(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights, none missing, none left over, each of the right shape.

    Raises:
        CheckpointError: Names them.
    """
    wanted = model.state_dict()
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted)
    shapes = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in weights and weights[name].shape != value.shape
    ]
    problems = [
        f"{words} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for words, names in (("missing", missing), ("unknown", unknown), ("of wrong shape", shapes))
        if names
    ]
    if problems:
        raise CheckpointError(f"weights do not fit the architecture: {'; '.join(problems)}")
    floats = {key: value.float() if value.is_floating_point() else value
              for key, value in weights.items()}  # fmt: skip
    model.load_state_dict(floats, strict=True, assign=True)
    model.requires_grad_(False)


def _shape_of(
    weights: Mapping[str, torch.Tensor], *, heads: int, image_px: int, epsilon: float
) -> VitShape:
    width, _, patch_px, _ = weights["patch_embed.proj.weight"].shape
    if width % heads:
        raise ValueError(f"tokens of {width} in {heads} heads")
    depth = 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks."))
    hidden = weights["blocks.0.mlp.fc1.weight"].shape[0]
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    return VitShape(
        image_px=image_px,
        patch_px=patch_px,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        gated=weights["blocks.0.mlp.fc2.weight"].shape[1] * 2 == hidden,
        registers=registers,
        layer_scale="blocks.0.ls1.gamma" in weights,
        positions=_covered(weights["pos_embed"].shape[1], registers),
        epsilon=epsilon,
    )


def _covered(length: int, registers: int) -> Positions:
    """What a position embedding of this length covers: all that leaves a square of patches."""
    kinds: tuple[tuple[Positions, int], ...] = (
        ("patches", 0), ("class_and_patches", 1), ("all", 1 + registers),
    )  # fmt: skip
    for name, prefix in kinds:
        if round((length - prefix) ** 0.5) ** 2 == length - prefix:
            return name
    raise ValueError(f"{length} positions are no square")


def _fit_positions(positions: torch.Tensor, shape: VitShape) -> torch.Tensor:
    """Resample the positions of the patches to this image's grid (bicubic, antialiased)."""
    prefix = {"patches": 0, "class_and_patches": 1, "all": shape.prefix_tokens}[shape.positions]
    side = shape.image_px // shape.patch_px
    stored = round((positions.shape[1] - prefix) ** 0.5)
    if stored == side:
        return positions
    # In double precision: in single, the last bits would be another processor's other ones.
    grid = positions[:, prefix:].reshape(1, stored, stored, -1).permute(0, 3, 1, 2).double()
    grid = functional.interpolate(grid, (side, side), mode="bicubic", antialias=True).float()
    return torch.cat([positions[:, :prefix].float(), grid.flatten(2).transpose(1, 2)], 1)


_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
_TRANSFORMERS_NAMES = (
    (r"^module\.", ""),  # of torch's DataParallel and DistributedDataParallel
    (r"^(vit|dinov2|model)\.", ""),
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.register_tokens", "reg_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.(layernorm_before|norm1)\.", ".norm1."),
    (r"\.(layernorm_after|norm2)\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
# Only for training or for heads that an encoder does not have.
_IGNORED = re.compile(r"^(embeddings\.mask_token|mask_token|pooler\..*|head\..*|classifier\..*)$")


def to_timm_names(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Bring names of the transformers library to timm's; those of timm stay.

    Separate matrices for queries, keys and values become one. Heads, poolers and mask tokens,
    which no embedding passes through, are dropped.
    """
    renamed: Weights = {}
    for key, value in weights.items():
        name = key
        for pattern, replacement in _TRANSFORMERS_NAMES:
            name = re.sub(pattern, replacement, name)
        if not _IGNORED.match(name):
            renamed[name] = value
    for key in [key for key in renamed if ".attention.attention.query." in key]:
        parts = [
            renamed.pop(key.replace("query", part), None) for part in ("query", "key", "value")
        ]
        present = [part for part in parts if part is not None]
        if len(present) == 3:
            renamed[key.replace("attention.attention.query", "attn.qkv")] = torch.cat(present)
    return renamed


def read_weights(folder: Path) -> tuple[Weights, list[Path]]:
    """The weights of a local folder, read without running anything from it.

    Args:
        folder: Holds ``model.safetensors`` (or its index and parts), or ``pytorch_model.bin``.

    Returns:
        The weights, and the files they came from.

    Raises:
        CheckpointError: There are none, or they cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    pickled = folder / "pytorch_model.bin"
    try:
        if single.exists():
            return read_safetensors(single), [single]
        if index.exists():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            if any("/" in name for name in names):
                raise CheckpointError(f"{index}: names files outside the folder")
            merged: Weights = {}
            for name in names:
                merged |= read_safetensors(folder / name)
            return merged, [folder / name for name in names]
        if pickled.exists():
            return _read_pickled(pickled), [pickled]
    except CheckpointError:
        raise
    except Exception as exc:  # torch and pickle document no error types; this is their border
        raise CheckpointError(f"{folder}: weights cannot be read: {exc}") from exc
    other = next((path for path in sorted(folder.iterdir()) if path.suffix in _WEIGHTS), None)
    wanted = single.name if other and other.suffix == single.suffix else pickled.name
    hint = f"; if {other.name} holds the weights by name, call it {wanted}" if other else ""
    raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin{hint}")


def _read_pickled(path: Path) -> Weights:
    """Read what ``torch.save`` wrote of a ``state_dict``; nothing else is unpickled.

    Raises:
        CheckpointError: It holds more than tensors, or is damaged.
    """
    try:
        # Files of the format before torch 1.6 are no archives.
        mmap = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        weights = dict(loaded)
    except OSError:
        raise
    except Exception as exc:  # torch and pickle document no error types; this is their border
        found = re.search(r"GLOBAL (\S+)", str(exc))
        more = f"; it holds a {found[1]}" if found else ""
        raise CheckpointError(
            f"{path}: no mapping of names to tensors, which is all that is read of a pickle{more}; "
            "save the network's state_dict() there, or as model.safetensors"
        ) from exc
    others = [str(name) for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        # As training code keeps them, with the epoch and the optimiser's state.
        raise CheckpointError(
            f"{path}: holds {', '.join(others[:4])}, which are no tensors; save the network's "
            "state_dict() there by itself"
        )
    return weights


def read_safetensors(path: Path) -> Weights:
    """Read a safetensors file: a JSON header, then plain numbers.

    Raises:
        CheckpointError: It is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{path}: truncated or not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as exc:
            raise CheckpointError(f"{path}: its header cannot be read") from exc
    start = 8 + length
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            piece = raw[start + first : start + last]
            if not 0 <= first <= last <= size - start:
                raise ValueError("outside the file")
            # The format does not promise the alignment that a view needs.
            weights[name] = piece.clone().view(dtype).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError, RuntimeError) as exc:
            raise CheckpointError(f"{path}: {name} cannot be read ({exc}); truncated?") from exc
    return weights


def random_vit(shape: VitShape, *, depth: int) -> VisionTransformer:
    """A shallow copy with random weights of a sensible size, for tests and benchmarks."""
    model = VisionTransformer(VitShape(**{**asdict(shape), "depth": depth}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                continue
            scale = 0.02 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()
