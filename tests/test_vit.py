"""Our vision transformer is the usual one, for every layout of the facts table."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from bioptimus.errors import CheckpointError
from bioptimus.models.facts import FACTS, VitShape
from bioptimus.models.registry import SPECS
from bioptimus.runtime.export import TileModel
from bioptimus.runtime.fitting import pool_tokens
from bioptimus.runtime.sources import Source, from_folder
from bioptimus.runtime.vit import (
    VisionTransformer,
    Weights,
    random_vit,
    read_safetensors,
    read_weights,
    to_timm_names,
    vit_from_weights,
)

SMALL = VitShape(
    image_px=56, patch_px=14, width=32, depth=2, heads=2, hidden=48, gated=True, registers=4,
    positions="patches",
)  # fmt: skip
VITS = {key: facts for key, facts in FACTS.items() if facts.vit}


def narrow(shape: VitShape, *, depth: int = 2) -> VitShape:
    """The same layout with few blocks, and two heads of the same length."""
    length = shape.width // shape.heads
    hidden = round(shape.hidden / shape.width * 2 * length)
    return replace(shape, depth=depth, heads=2, width=2 * length, hidden=hidden + hidden % 2)


def write_safetensors(path: Path, weights: Weights) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, value in weights.items():
        raw = value.contiguous().numpy().tobytes()
        header[name] = {
            "dtype": "F32", "shape": list(value.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }  # fmt: skip
        body += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    return path


def hub_folder(folder: Path, shape: VitShape, weights: Weights, **config: object) -> Path:
    folder.mkdir()
    args = {"img_size": shape.image_px, "num_heads": shape.heads}
    (folder / "config.json").write_text(json.dumps({"model_args": args, **config}))
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def reference(images: torch.Tensor, weights: Weights, shape: VitShape) -> torch.Tensor:
    """Tokens by the formulas, in double precision, straight from weights named by timm."""
    w = {key: value.double() for key, value in weights.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.sqrt(centred.square().mean(-1, keepdim=True) + shape.epsilon)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    side, p = shape.image_px // shape.patch_px, shape.patch_px
    count = len(images)
    patches = images.double().reshape(count, 3, side, p, side, p).permute(0, 2, 4, 1, 3, 5)
    kernel = w["patch_embed.proj.weight"].reshape(shape.width, -1)
    x = patches.reshape(count, side * side, -1) @ kernel.T + w["patch_embed.proj.bias"]
    cls = w["cls_token"].repeat(count, 1, 1)
    registers = w["reg_token"].repeat(count, 1, 1) if shape.registers else cls[:, :0]
    positions = w["pos_embed"]
    if shape.positions == "patches":
        x = torch.cat([cls, registers, x + positions], 1)
    elif shape.positions == "all":
        x = torch.cat([cls, registers, x], 1) + positions
    else:
        x = torch.cat([cls + positions[:, :1], registers, x + positions[:, 1:]], 1)
    for number in range(shape.depth):
        block = f"blocks.{number}."
        parts = linear(normed(x, block + "norm1"), block + "attn.qkv").chunk(3, -1)
        heads = []
        for q, k, v in zip(*(part.chunk(shape.heads, -1) for part in parts), strict=True):
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
            heads.append(scores.softmax(-1) @ v)
        y = linear(torch.cat(heads, -1), block + "attn.proj")
        x = x + y * w.get(block + "ls1.gamma", torch.ones(()))
        y = linear(normed(x, block + "norm2"), block + "mlp.fc1")
        if shape.gated:
            a, b = y.chunk(2, -1)
            y = a * torch.sigmoid(a) * b
        else:
            y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        y = linear(y, block + "mlp.fc2")
        x = x + y * w.get(block + "ls2.gamma", torch.ones(()))
    return normed(x, "norm")


def shallow(key: str, folder: Path) -> tuple[Source, VitShape, Weights]:
    """The model of a row, few blocks and two heads, read from a folder as users have it."""
    full = FACTS[key].vit
    assert full is not None
    shape = narrow(full)
    weights = random_vit(shape, depth=shape.depth).state_dict()
    source = from_folder(hub_folder(folder / key, shape, weights), facts_key=key)
    return source, shape, weights


def expected_embedding(
    key: str, tiles: torch.Tensor, shape: VitShape, weights: Weights
) -> torch.Tensor:
    facts = FACTS[key]
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in (facts.mean, facts.std))
    images = (tiles.permute(0, 3, 1, 2).double() / 255 - mean) / std
    return pool_tokens(
        reference(images, weights, shape), pooling=facts.pooling,
        prefix_tokens=shape.prefix_tokens,
    )  # fmt: skip


def some_tiles() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("key", list(VITS))
def test_each_known_model_read_from_a_folder_gives_its_formula(key: str, tmp_path: Path) -> None:
    source, shape, weights = shallow(key, tmp_path)
    with torch.inference_mode():
        (found,) = TileModel(source.network, source.spec)(some_tiles())
    expected = expected_embedding(key, some_tiles(), shape, weights)
    assert functional.cosine_similarity(found.double(), expected).min() > 0.999999
    # What two heads give, in proportion, is what the table says of all heads.
    full = FACTS[key].vit
    assert full is not None
    assert found.shape[1] * full.heads == FACTS[key].dim * 2


# Millions of parameters that the model cards state.
STATED = {
    "h0": 1134.8, "h0-mini": 86, "h1": 1134.8, "uni": 303.4, "uni2-h": 681.4, "virchow": 631.2,
    "virchow2": 631.2, "gigapath": 1134.9, "phikon": 85.8, "phikon-v2": 303.4, "hibou-b": 85.7,
    "hibou-l": 303.7, "kaiko-s16": 21.7, "kaiko-s8": 21.7, "kaiko-b16": 85.8, "kaiko-b8": 85.8,
    "kaiko-l14": 303.2, "lunit-s16": 21.7, "lunit-s8": 21.7,
}  # fmt: skip


@pytest.mark.parametrize("key", list(VITS))
def test_the_full_shape_has_the_stated_number_of_parameters(key: str) -> None:
    shape = FACTS[key].vit
    assert shape is not None
    with torch.device("meta"):
        model = VisionTransformer(shape)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(STATED[key], rel=0.005)


@pytest.mark.parametrize("key", ["h0", "h0-mini", "h1"])
def test_facts_and_registry_agree(key: str) -> None:
    spec, facts = SPECS[key], FACTS[key].spec()
    for name in ("mean", "std", "tile", "embedding_dim", "pooling", "prefix_tokens", "licence"):
        assert getattr(spec, name) == getattr(facts, name), name


def test_every_row_says_what_was_verified() -> None:
    for facts in FACTS.values():
        assert len(facts.verified) > 20
        assert facts.licence
        assert facts.spec().embedding_dim == facts.dim


def to_transformers(weights: Weights, shape: VitShape, *, dino: bool) -> Weights:
    """The names of the transformers library, for its ViT or its DINOv2."""
    named: Weights = {"embeddings.cls_token": weights["cls_token"]}
    named["embeddings.position_embeddings"] = weights["pos_embed"]
    if dino:
        named["embeddings.mask_token"] = torch.zeros(1, shape.width)
    if shape.registers:
        named["embeddings.register_tokens"] = weights["reg_token"]
    for kind in ("weight", "bias"):
        named[f"embeddings.patch_embeddings.projection.{kind}"] = weights[
            f"patch_embed.proj.{kind}"
        ]
        named[f"layernorm.{kind}"] = weights[f"norm.{kind}"]
        for number in range(shape.depth):
            ours, theirs = f"blocks.{number}", f"encoder.layer.{number}"
            for part, value in zip(
                ("query", "key", "value"), weights[f"{ours}.attn.qkv.{kind}"].chunk(3), strict=True
            ):
                named[f"{theirs}.attention.attention.{part}.{kind}"] = value
            mlp = ("intermediate.dense", "output.dense")
            if dino:
                mlp = (
                    ("mlp.weights_in", "mlp.weights_out") if shape.gated else ("mlp.fc1", "mlp.fc2")
                )
            norms = ("norm1", "norm2") if dino else ("layernorm_before", "layernorm_after")
            pairs = {
                "attn.proj": "attention.output.dense", "mlp.fc1": mlp[0], "mlp.fc2": mlp[1],
                "norm1": norms[0], "norm2": norms[1],
            }  # fmt: skip
            for mine, other in pairs.items():
                named[f"{theirs}.{other}.{kind}"] = weights[f"{ours}.{mine}.{kind}"]
    if dino:
        for number in range(shape.depth):
            for which in (1, 2):
                named[f"encoder.layer.{number}.layer_scale{which}.lambda1"] = weights[
                    f"blocks.{number}.ls{which}.gamma"
                ]
    else:
        named["pooler.dense.weight"] = torch.zeros(shape.width, shape.width)
    return named


@pytest.mark.parametrize("prefix", ["", "dinov2."])
@pytest.mark.parametrize(
    ("shape", "dino"),
    [
        (replace(SMALL, gated=False, registers=0, layer_scale=False,
                 positions="class_and_patches"), False),
        (replace(SMALL, registers=0, positions="class_and_patches"), True),
        (replace(SMALL, gated=False, positions="class_and_patches"), True),
    ],
    ids=["vit", "dinov2 gated", "dinov2 with registers"],
)  # fmt: skip
def test_names_of_the_transformers_library_are_translated(
    shape: VitShape, dino: bool, prefix: str
) -> None:
    weights = random_vit(shape, depth=2).state_dict()
    named = {prefix + k: v for k, v in to_transformers(weights, shape, dino=dino).items()}
    back = to_timm_names(named)
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(back[name], value), name
    assert vit_from_weights(named, heads=2, image_px=56).shape == shape


def test_positions_of_another_grid_are_resampled() -> None:
    large = replace(SMALL, image_px=112)
    weights = random_vit(large, depth=2).state_dict()
    # A ramp stays a ramp, whatever the grid.
    ramp = torch.linspace(0, 1, 8).view(1, 1, 8, 1).expand(1, 8, 8, 32).reshape(1, 64, 32)
    model = vit_from_weights(weights | {"pos_embed": ramp}, heads=2, image_px=56)
    rows = model.pos_embed.reshape(4, 4, 32)[..., 0]
    assert torch.allclose(rows, rows[:1].expand(4, 4), atol=1e-5)
    assert (rows[0].diff() > 0).all()
    assert model(torch.zeros(1, 3, 56, 56)).shape == (1, 21, 32)


def test_missing_unknown_and_misshapen_weights_are_named() -> None:
    weights = random_vit(SMALL, depth=2).state_dict()
    del weights["blocks.1.norm2.bias"]
    weights["blocks.0.attn.q_norm.weight"] = torch.zeros(16)
    weights["norm.weight"] = torch.zeros(7)
    with pytest.raises(CheckpointError) as caught:
        vit_from_weights(weights, heads=2, image_px=56)
    for words in ("missing blocks.1.norm2.bias", "unknown blocks.0.attn.q_norm.weight",
                  "norm.weight (7,) instead of (32,)"):  # fmt: skip
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.pop("cls_token"), lambda w: w.pop("pos_embed"),
     lambda w: w.update(pos_embed=torch.zeros(1, 13, 32))],
)  # fmt: skip
def test_other_architectures_are_refused(change: Callable[[Weights], object]) -> None:
    weights = random_vit(SMALL, depth=2).state_dict()
    change(weights)
    with pytest.raises(CheckpointError):
        vit_from_weights(weights, heads=2, image_px=56)
    with pytest.raises(CheckpointError, match="tokens of 32 in 5 heads"):
        vit_from_weights(random_vit(SMALL, depth=2).state_dict(), heads=5, image_px=56)


def test_weights_are_read_from_each_layout_of_a_folder(tmp_path: Path) -> None:
    weights = random_vit(SMALL, depth=2).state_dict()
    whole, parts, pickled = (tmp_path / name for name in ("whole", "parts", "pickled"))
    for folder in (whole, parts, pickled):
        folder.mkdir()
    write_safetensors(whole / "model.safetensors", weights)
    names = list(weights)
    split = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, keys in split.items():
        write_safetensors(parts / file, {key: weights[key] for key in keys})
    index = {"weight_map": {key: file for file, keys in split.items() for key in keys}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(weights, pickled / "pytorch_model.bin")
    for folder, count in ((whole, 1), (parts, 2), (pickled, 1)):
        found, files = read_weights(folder)
        assert len(files) == count
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in names)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (Path.touch, (Path("evil-was-here"),))  # type: ignore[return-value]


def test_pickled_weights_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"cls_token": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="it holds a "):
        read_weights(tmp_path)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("kept", [4, 30, -10])
def test_a_safetensors_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_safetensors(path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../secret.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_weights(tmp_path)


def test_pickled_weights_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    weights, files = read_weights(tmp_path)
    assert files == [path]
    assert weights["a"].tolist() == [1, 1, 1]


def test_a_pickle_of_anything_else_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    told = f"{path}: no mapping of names to tensors, which is all that is read of a pickle"
    for value, more in (
        (torch.nn.Linear(2, 2), "; it holds a torch.nn.modules.linear.Linear"),
        (3, ""),
    ):
        torch.save(value, path)
        with pytest.raises(CheckpointError) as caught:
            read_weights(tmp_path)
        assert str(caught.value).startswith(f"{told}{more}; save the network's state_dict()")
    for content in (b"hello", b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_weights(tmp_path)
        assert str(caught.value).startswith(told)


def test_a_checkpoint_of_training_code_is_told_from_weights(tmp_path: Path) -> None:
    weights = random_vit(SMALL, depth=2).state_dict()
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    assert to_timm_names(wrapped).keys() == to_timm_names(weights).keys()
    with pytest.raises(CheckpointError, match=r"nor pytorch_model\.bin$"):
        read_weights(tmp_path)
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"last\.ckpt holds .*, call it pytorch_model\.bin$"):
        read_weights(tmp_path)
    torch.save({"epoch": 3, "model": weights}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds epoch, model, which are no tensors; save"):
        read_weights(tmp_path)
