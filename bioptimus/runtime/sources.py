"""Where a network to export comes from: a local folder, a Python function, or the hub.

Nothing is downloaded unless the user asked for it and accepted the licence by name, and from
folders only plain data is read: JSON and tensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bioptimus.errors import CheckpointError, UsageError
from bioptimus.models.facts import FACTS, Facts, get_facts
from bioptimus.models.types import Models, ModelSpec
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.runners import require_device
from bioptimus.tiles import TileSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bioptimus.runtime.export import ExportReport

log = logging.getLogger(__name__)

# Heads of timm's plain vision transformers; the weights do not tell.
_HEADS_BY_NAME = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}
_HEADS_BY_WIDTH = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A network ready to be exported.

    Attributes:
        network: Takes normalised images (N, 3, H, W).
        spec: What is known about it.
    """

    network: nn.Module
    spec: ModelSpec


def from_folder(
    folder: Path, *, facts_key: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Source:
    """Read a network from a local folder as the Hugging Face hub lays it out.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``.
        facts_key: Which model of the facts table it is; what the table says goes before
            ``config.json`` then, except shapes, which the weights tell.
        overrides: Fields of the specification that the user sets.

    Raises:
        CheckpointError: A file is missing or damaged, weights do not fit the architecture, or
            the architecture needs timm and that is not here.
        UsageError: No facts under that key.
    """
    facts = get_facts(facts_key) if facts_key else None
    config = _read_config(folder, needed=facts is None)
    from bioptimus.runtime.vit import read_weights, to_timm_names, vit_from_weights

    weights, files = read_weights(folder)
    given = dict(overrides or {})
    try:
        spec = facts.spec() if facts else _spec_of(folder, config, given)
    except (TypeError, ValueError, AttributeError, IndexError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: config.json cannot be understood: {exc}") from exc
    spec = _with(spec, given)
    # By their digest alone: the folder's name is this machine's, may be a person's, and would make
    # another model of the same weights.
    spec = spec.with_(source_sha256=_digest_of(files))
    if "patch_embed.proj.weight" in to_timm_names(weights):
        network: nn.Module = vit_from_weights(
            weights,
            heads=_heads(folder, config, facts, weights),
            image_px=spec.tile.size_px,
            epsilon=float(config.get("layer_norm_eps", facts.vit.epsilon
                                     if facts and facts.vit else 1e-6)),
        )  # fmt: skip
    else:
        network = _from_timm(config, facts, weights)
    prefix = getattr(getattr(network, "shape", None), "prefix_tokens", spec.prefix_tokens)
    return Source(network=network, spec=spec.with_(prefix_tokens=prefix))


def from_function(reference: str, spec: ModelSpec) -> Source:
    """Call a Python function that returns the network.

    Args:
        reference: ``module:function``; the module is looked for in the current folder too.
        spec: What the user says about the network.

    Raises:
        UsageError: There is no such module or function.
        CheckpointError: It fails, returns something else than a module, or one with weights that
            are drawn at random.
    """
    from torch import nn

    module_name, _, function_name = reference.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as exc:
        raise UsageError(f"{reference}: cannot be imported: {exc}") from exc
    finally:
        sys.path.remove(here)
    try:
        network = function()
    except Exception as exc:  # the user's own code; anything may come out of it
        raise CheckpointError(f"{reference}: failed: {exc!r}") from exc
    if not isinstance(network, nn.Module):
        raise CheckpointError(f"{reference}: returned {type(network).__name__}, not an nn.Module")
    _refuse_random_weights(reference, network, function)
    return Source(network=network, spec=spec.with_(source=spec.source or reference))


def _refuse_random_weights(
    reference: str, network: nn.Module, function: Callable[[], object]
) -> None:
    """Call the function again: weights that it did not load are drawn anew.

    A class in place of a function, or a checkpoint whose names did not fit and ``strict=False``,
    would otherwise give a file that agrees with the network and means nothing.
    """
    import torch
    from torch import nn

    try:
        again = function()
    except Exception as exc:  # the user's own code; anything may come out of it
        raise CheckpointError(f"{reference}: failed when called a second time: {exc!r}") from exc
    others = again.state_dict() if isinstance(again, nn.Module) else {}
    weights = network.state_dict()
    drawn = [
        name
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
        and not (name in others and _is_same(value, others[name]))
    ]
    if drawn:
        raise CheckpointError(
            f"{reference}: {len(drawn)} of its {len(weights)} weights are others each time it is "
            f"called, such as {drawn[0]}: have it load your checkpoint into all of them "
            "(load_state_dict, strict), and remove layers that the checkpoint lacks"
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same, NaN in the same places included."""
    import torch

    if torch.equal(one, other):
        return True
    # NaN is not equal to itself, also where it was loaded.
    known = one == one
    return (
        one.shape == other.shape
        and torch.equal(known, other == other)
        and torch.equal(one[known], other[known])
    )


def from_hub(
    key: str,
    *,
    accept_licence: bool,
    overrides: Mapping[str, Any] | None = None,
    tell: Callable[[str], object] = log.info,
) -> Source:
    """Download a model of the facts table, once its licence was accepted.

    Args:
        key: Which model.
        accept_licence: Whether the user accepts its licence.
        overrides: Fields of the specification that the user sets.
        tell: Is told what will be fetched before it is.

    Raises:
        UsageError: No facts under that key, or the licence was not accepted; the message says
            what would be fetched, from where, and under which licence.
        CheckpointError: The download fails, or the hub's client is not installed.
    """
    facts = get_facts(key)
    if facts.vit is None and not facts.timm_name:
        raise UsageError(f"{key}: {facts.verified}")
    from bioptimus.runtime.hub import download, list_files

    try:
        files = list_files(facts.repository)
    except CheckpointError as exc:
        if accept_licence:
            raise
        # Without network the licence can still be told.
        raise UsageError(
            f"{key}: would download the weights of {facts.repository}, under the licence: "
            f"{facts.licence}; add --accept-licence once you have read it (now: {exc})"
        ) from exc
    licence = facts.licence
    if files.licence and files.licence.lower() != licence.lower():
        licence += f" (its page says {files.licence})"
    if not accept_licence:
        raise UsageError(
            f"{key}: would download {files} of {facts.repository}, under the licence: {licence}. "
            f"Read it at https://huggingface.co/{facts.repository}, then add --accept-licence"
        )
    tell(f"downloading {files} of {facts.repository}, licence: {licence}")
    found = from_folder(download(files), facts_key=key, overrides=overrides)
    spec = found.spec.with_(source=f"{facts.repository}@{files.revision}")
    return Source(network=found.network, spec=spec)


def export_source(
    source: str,
    out: Path | None,
    *,
    facts_key: str | None,
    overrides: Mapping[str, Any],
    device: str,
    slide: Path | None,
    hub: bool,
    accept_licence: bool,
    overwrite: bool = False,
    tell: Callable[[str], object] = log.info,
) -> ExportReport:
    """Find the network, export it, compare it.

    Args:
        source: A folder, ``module:function``, or with ``hub`` a key of the facts table.
        out: The file to write; ``<name>.pt2`` in the current folder if not given.
        facts_key: Which model of the facts table it is.
        overrides: Fields of the specification that the user sets; of its tile as ``tile_px`` and
            ``mpp``.
        device: Where to trace.
        slide: Compare on tiles of this slide too.
        hub: Download the weights.
        accept_licence: The user accepts the licence of what is downloaded.
        overwrite: Replace a file that is there.
        tell: Is told what will be downloaded before it is.

    Raises:
        UsageError: The options make no sense, the device is not there, or the file is, and is not
            to be replaced.
        CheckpointError: The network cannot be read or exported, or the file differs from it.
        SlideError: The slide cannot be read.
    """
    _check_overrides(overrides)
    name = _name(source, facts_key, overrides, hub=hub)
    if name == Models.LITE0:
        raise UsageError(f"{name}: the built-in model is called so; pass another --name")
    path = out or Path(f"{name}.pt2")
    if path.is_dir():
        raise UsageError(
            f"{path}: is a folder; name the file to write, such as --out {path / 'model.pt2'}"
        )
    if path.exists() and not overwrite:
        raise UsageError(f"{path}: is there already; pass --overwrite, or another name with --out")
    require_device(device)  # before anything is downloaded
    if hub:
        found = from_hub(source, accept_licence=accept_licence, overrides=overrides, tell=tell)
    elif ":" in source and not Path(source).exists():
        base = get_facts(facts_key).spec() if facts_key else _undescribed(source, overrides)
        found = from_function(source, _with(base, overrides))
    elif Path(source).is_dir():
        found = from_folder(Path(source), facts_key=facts_key, overrides=overrides)
    else:
        raise UsageError(
            f"{source}: neither a folder of weights nor module:function{_hint(source)}"
        )
    tiles = sample_tiles(slide, found.spec) if slide else None
    from bioptimus.runtime.export import export_module

    return export_module(found.network, found.spec, path, device=device, real_tiles=tiles)


def _hint(source: str) -> str:
    """What to give in place of a source that is none."""
    if source in FACTS:
        return "; to download it add --from-hub"
    if Path(source).is_file():
        return (
            "; a file of weights does not tell the network: write a function that builds it and "
            "loads them, and give that, as my_code:build_network"
        )
    return ""


def _name(source: str, facts_key: str | None, overrides: Mapping[str, Any], *, hub: bool) -> str:
    """What the model will be called, which is known before its weights are read."""
    _, _, function = source.partition(":")
    name = source if hub else facts_key or function or Path(source).resolve().name
    return str(overrides.get("name", name))


def sample_tiles(slide: Path, spec: ModelSpec, *, count: int = 4) -> torch.Tensor:
    """The darkest of some tiles spread over a slide, which are most likely tissue.

    Returns:
        (count or fewer, H, W, 3) uint8 at the specification's size and scale.

    Raises:
        SlideError: The slide cannot be opened or read at that scale.
    """
    import numpy as np
    import torch

    from bioptimus.io.wsi import Slide
    from bioptimus.tiles import plan_tiles

    with Slide.open(slide) as opened:
        grid = plan_tiles(opened.dimensions, spec=spec.tile, mpp=opened.mpp)
        reader = opened.tile_reader(spec.tile)
        step = max(1, len(grid) // 64)
        tiles = [reader.read(grid[number]) for number in range(0, len(grid), step)]
    tiles.sort(key=lambda tile: float(tile.mean()))
    return torch.from_numpy(np.stack(tiles[:count]))


def _with(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """The specification with what the user says; the rest of a tile stays as it is."""
    given = dict(overrides)
    size_px, mpp = given.pop("tile_px", spec.tile.size_px), given.pop("mpp", spec.tile.mpp)
    return spec.with_(tile=replace(spec.tile, size_px=size_px, mpp=mpp), **given)


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    try:
        _with(ModelSpec(name="model"), overrides)
    except (CheckpointError, UsageError) as exc:
        raise UsageError(str(exc).removeprefix("model: ")) from exc


def _undescribed(reference: str, overrides: Mapping[str, Any]) -> ModelSpec:
    missing = [f"--{key}" for key in ("mpp", "mean", "std") if key not in overrides]
    if missing:
        # A wrong scale is told by nothing that comes out.
        raise UsageError(
            f"{reference}: pass {' and '.join(missing)} of its training (um per pixel; mean and "
            "deviation 0,0,0 and 1,1,1 if the network normalises by itself), or --as KEY"
        )
    return ModelSpec(name=overrides.get("name") or reference.partition(":")[2])


def _read_config(folder: Path, *, needed: bool) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    merged: dict[str, Any] = {}
    # The transformers library keeps mean and std in a file of their own.
    for name in ("preprocessor_config.json", "config.json"):
        path = folder / name
        if path.exists():
            try:
                merged |= json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as exc:
                raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
        elif name == "config.json" and needed:
            keys = ", ".join(FACTS)
            raise CheckpointError(f"{folder}: has no config.json; say what it is: --as {keys}")
    return merged


def _spec_of(folder: Path, config: dict[str, Any], given: Mapping[str, Any]) -> ModelSpec:
    """A specification from ``config.json`` alone."""
    pretrained = config.get("pretrained_cfg", config)
    mean = given.get("mean") or pretrained.get("mean", config.get("image_mean"))
    std = given.get("std") or pretrained.get("std", config.get("image_std"))
    if mean is None or std is None:
        raise CheckpointError(
            f"{folder}: config.json names no mean and std; pass --as KEY, or --mean and --std"
        )
    if "mpp" not in given:
        raise CheckpointError(
            f"{folder}: config.json names no scale; pass --mpp with the um per pixel of its "
            "training, or --as KEY"
        )
    size = pretrained.get("input_size") or [3, config.get("image_size", 224)]
    args = config.get("model_args") or {}
    return ModelSpec(
        name=given.get("name") or folder.resolve().name,
        tile=TileSpec(size_px=_side(args.get("img_size") or size)),
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        interpolation=str(pretrained.get("interpolation", "bicubic")),
        architecture=str(config.get("architecture") or config.get("model_type") or ""),
        pooling="cls",
    )


def _side(size: Any) -> int:
    """Of 224, [224, 224] or [3, 224, 224]: timm has written each."""
    return int(size[-1] if isinstance(size, list) else size)


def _heads(
    folder: Path, config: dict[str, Any], facts: Facts | None, weights: dict[str, Any]
) -> int:
    from bioptimus.runtime.vit import to_timm_names

    width = to_timm_names(weights)["patch_embed.proj.weight"].shape[0]
    heads = _stated_heads(config, facts) or _HEADS_BY_WIDTH.get(width)
    if heads and width % heads == 0:
        return heads
    known = (
        f"{heads} attention heads do not divide"
        if heads
        else "unknown how many heads there are for"
    )
    raise CheckpointError(
        f"{folder}: {known} tokens of {width}; state num_attention_heads in its config.json"
    )


def _stated_heads(config: dict[str, Any], facts: Facts | None) -> int | None:
    args = config.get("model_args") or {}
    stated = config.get("num_attention_heads") or config.get("num_heads") or args.get("num_heads")
    if isinstance(stated, int) and stated > 0:
        return stated
    if facts and facts.vit:
        return facts.vit.heads
    name = str(config.get("architecture", ""))
    return next((n for size, n in _HEADS_BY_NAME.items() if f"vit_{size}_" in name), None)


def _from_timm(config: dict[str, Any], facts: Facts | None, weights: dict[str, Any]) -> nn.Module:
    name = facts.timm_name if facts else str(config.get("architecture") or "")
    if facts and not name:
        raise CheckpointError(f"{facts.key}: {facts.verified}")
    if not name:
        raise CheckpointError(
            "neither a plain vision transformer nor an architecture that timm knows by name; "
            "export it from a Python function (module:function)"
        )
    try:
        import timm
    except Exception as exc:  # timm imports torchvision, which fails in many ways
        raise CheckpointError(
            f"{name}: needs timm, which cannot be imported ({exc}); "
            "pip install 'bioptimus-wsi[export]' with a torchvision that fits your torch"
        ) from exc
    from bioptimus.runtime.vit import load_strictly

    args = {**(config.get("model_args") or {}), **(facts.timm_args if facts else {})}
    network: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=0, **_layer_classes(args)
    )
    heads = ("head.", "classifier.", "fc.")
    load_strictly(network, {k: v for k, v in weights.items() if not k.startswith(heads)})
    return network


def _layer_classes(args: dict[str, Any]) -> dict[str, Any]:
    """Layer classes by name: those of the facts table, and no others."""
    from timm.layers import SwiGLUPacked
    from torch import nn

    classes = {"SwiGLUPacked": SwiGLUPacked, "SiLU": nn.SiLU, "GELU": nn.GELU}
    args.pop("num_classes", None)
    return {
        key: classes[value] if key in ("mlp_layer", "act_layer") and value in classes else value
        for key, value in args.items()
    }


def _digest_of(files: list[Path]) -> str:
    """The file's digest; of several files, the digest of their digests."""
    digests = [file_sha256(path) for path in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
