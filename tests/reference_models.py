"""Published code of the models in the facts table, built small, for tests that compare with it.

``main`` runs in a process of its own, where timm and the transformers library can be imported:
they lie in ``.reference`` beside the checkout (``make test`` puts them there). torchvision, which
timm imports for its image transforms and data sets, would want another torch; there it is a name
with nothing behind it, and no network uses it.

FOLDER/tiles.npy holds tiles (N, 224, 224, 3), FOLDER/slide_tiles.npy those of a slide. For each
row of the table that either library can build: FOLDER/<key> is written as the hub has it, with
few blocks and random weights, and FOLDER/<key>.npy is its embedding of the tiles in double
precision. FOLDER/shapes.json tells the shapes of the parameters of timm's full models.
FOLDER/H-optimus-0 has blocks of full size, FOLDER/resnet50.pt2 was exported beside timm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from bioptimus.models.facts import FACTS, Facts
from cli.main import main as command

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / ".reference"
TIMM = [key for key, facts in FACTS.items() if facts.timm_name]
TRANSFORMERS = {
    "phikon": ("ViTConfig", "ViTModel"),
    "phikon-v2": ("Dinov2Config", "Dinov2Model"),
    "hibou-b": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel"),
    "hibou-l": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel"),
}
DEPTH, HEADS = 2, 2


def missing() -> str:
    """Why no reference can be run here; empty if one can."""
    if LIBRARIES.is_dir() or all(map(importlib.util.find_spec, ("timm", "transformers"))):
        return ""
    return "needs timm and transformers in .reference (`make test` puts them there)"


def write_references(folder: Path) -> None:
    """Fill the folder, in a process of its own."""
    code = (
        "import sys, pathlib\n"
        "from tests.reference_models import main\n"
        "main(pathlib.Path(sys.argv[1]))\n"
    )
    paths = [str(ROOT), str(LIBRARIES), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class _Named(type):
    """A class whose every attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _NamesOnly(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


def stand_in_for_torchvision() -> None:
    """Let timm import the names of torchvision; its networks use none of them."""
    names = (
        "transforms", "transforms.functional", "datasets", "ops", "ops.misc", "models",
        "models.feature_extraction",
    )  # fmt: skip
    for name in ("torchvision", *(f"torchvision.{name}" for name in names)):
        module = _NamesOnly(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def randomise(network: nn.Module) -> nn.Module:
    """Weights with which every part of the network changes the outcome."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if not value.is_floating_point():
                value.zero_()
                continue
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
                value.copy_(1 + 0.1 * noise.abs())
            elif "gamma" in name or "lambda" in name:
                value.copy_(0.5 + 0.1 * noise)
            elif value.ndim > 1 and name.endswith("weight"):
                value.copy_(noise / value[0].numel() ** 0.5)
            else:
                value.copy_(0.3 * noise)
    return network.eval()


def timm_network(key: str, **changes: Any) -> nn.Module:
    """What the model card builds, with some arguments changed and no memory behind it."""
    import timm
    from timm.layers import SwiGLUPacked

    facts = FACTS[key]
    classes = {"SwiGLUPacked": SwiGLUPacked, "SiLU": nn.SiLU}
    args = {k: classes.get(v, v) if isinstance(v, str) else v for k, v in facts.timm_args.items()}
    # Initial weights take more time to draw than all else here, and are not looked at.
    with torch.device("meta"):
        network: nn.Module = timm.create_model(
            facts.timm_name, pretrained=False, num_classes=0, **args | changes
        )
    return network


def small(facts: Facts) -> dict[str, Any]:
    """Arguments for few blocks of two heads, each as long as the model's."""
    if facts.vit is None:
        return {"layers": [1, 1, 1, 1]}
    width = HEADS * facts.vit.width // facts.vit.heads
    return {"depth": DEPTH, "embed_dim": width, "num_heads": HEADS}


def write_timm_folder(key: str, network: nn.Module, folder: Path, changes: dict[str, Any]) -> None:
    """Write a folder as timm itself writes one for the hub."""
    from timm.models import save_for_hf

    facts = FACTS[key]
    save_for_hf(
        network,
        folder,
        model_args={**facts.timm_args, **changes},
        safe_serialization=True,
        data_config={"mean": facts.mean, "std": facts.std},
    )


def transformers_network(key: str) -> nn.Module:
    """The model's class of the transformers library, with few blocks of two heads."""
    import transformers

    config_name, model_name = TRANSFORMERS[key]
    shape = FACTS[key].vit
    assert shape is not None
    width = HEADS * shape.width // shape.heads
    args: dict[str, Any] = {
        "hidden_size": width, "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS, "image_size": shape.image_px, "patch_size": shape.patch_px,
        "layer_norm_eps": shape.epsilon, "num_register_tokens": shape.registers,
        "intermediate_size": 4 * width, "mlp_ratio": 4,
    }  # fmt: skip
    # Each configuration takes the names that it knows; the others would only be written along.
    known = getattr(transformers, config_name)().to_dict()
    config = getattr(transformers, config_name)(**{k: v for k, v in args.items() if k in known})
    build = getattr(transformers, model_name)
    network: nn.Module = (
        build(config, add_pooling_layer=False) if model_name == "ViTModel" else build(config)
    )
    return network


def embed(network: nn.Module, facts: Facts, tiles: np.ndarray[Any, Any]) -> Any:
    """The embedding of the model card in double precision, (N, D)."""
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in (facts.mean, facts.std))
    images = (torch.from_numpy(tiles).permute(0, 3, 1, 2).double() / 255 - mean) / std
    network = network.double()
    with torch.inference_mode():
        output = network(images)
    output = getattr(output, "last_hidden_state", output)
    if output.ndim == 3:
        patches = output[:, getattr(network, "num_prefix_tokens", 1) :]
        output = output[:, 0]
        if facts.pooling == "cls_mean":
            output = torch.cat([output, patches.mean(1)], -1)
    return output.numpy()


def shapes_of(network: nn.Module) -> dict[str, list[int]]:
    """Parameter → shape."""
    return {name: list(value.shape) for name, value in network.state_dict().items()}


def main(folder: Path) -> None:
    """See the module."""
    tiles = np.load(folder / "tiles.npy")
    shapes: dict[str, dict[str, list[int]]] = {}
    for key in TRANSFORMERS:
        network = randomise(transformers_network(key))
        network.save_pretrained(folder / key)  # type: ignore[operator]
        np.save(folder / f"{key}.npy", embed(network, FACTS[key], tiles))
    # Only now: the transformers library asks for the version of what is there.
    stand_in_for_torchvision()
    for key in TIMM:
        changes = small(FACTS[key])
        network = randomise(timm_network(key, **changes).to_empty(device="cpu"))
        write_timm_folder(key, network, folder / key, changes)
        np.save(folder / f"{key}.npy", embed(network, FACTS[key], tiles))
        shapes[key] = shapes_of(timm_network(key))
    (folder / "shapes.json").write_text(json.dumps(shapes))
    network = randomise(timm_network("h0", depth=1).to_empty(device="cpu"))
    write_timm_folder("h0", network, folder / "H-optimus-0", {"depth": 1})
    rows = embed(network, FACTS["h0"], np.load(folder / "slide_tiles.npy"))
    np.save(folder / "H-optimus-0.npy", rows)
    # Our own command goes through timm for what is no vision transformer.
    export = ["models", "export", str(folder / "resnet50"), "--as", "resnet50"]
    assert command([*export, "-o", str(folder / "resnet50.pt2")]) == 0
