"""The built-in model: the package's weights, measures that mean what they say, made once."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.nn import functional

from bioptimus.errors import CheckpointError
from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.registry import LITE0_MEASURES, get_spec
from bioptimus.runtime import builtin
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.builtin import builtin_checkpoint, weights_path
from bioptimus.runtime.lite0 import STAGES, Lite0, lite0_from_weights
from bioptimus.runtime.loader import build_server_model
from bioptimus.runtime.runners import open_runner

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Weights:
    loaded: Weights = torch.load(weights_path(), weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def model(weights: Weights) -> Lite0:
    return lite0_from_weights(weights)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIOPTIMUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return builtin_checkpoint().path


def he_tiles(folder: Path) -> dict[str, torch.Tensor]:
    """The upper-left 224 px of each real H&E patch, brought to about 0.5 µm/px."""
    found = {}
    for path in sorted((folder / "he-patches").iterdir()):
        bgr = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if bgr is None:
            continue
        rgb = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
        if "level0" in path.name:  # 40x: 0.25 µm/px
            rgb = cv2.resize(rgb, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
        if min(rgb.shape[:2]) >= 224:
            found[path.stem] = torch.from_numpy(np.ascontiguousarray(rgb[:224, :224]))
    return found


def same_pad(features: torch.Tensor, kernel: int, stride: int) -> torch.Tensor:
    """TensorFlow's SAME, from its definition."""
    pads = []
    for size in (features.shape[3], features.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return functional.pad(features, pads)


def reference(tiles: torch.Tensor, weights: Weights) -> torch.Tensor:
    """The original network, straight from its weights, in double precision, nothing folded."""

    def conv(x: torch.Tensor, name: str, norm: str, stride: int = 1) -> torch.Tensor:
        weight = weights[f"{name}.weight"].double()
        groups = x.shape[1] // weight.shape[1]
        x = functional.conv2d(
            same_pad(x, weight.shape[2], stride), weight, stride=stride, groups=groups
        )
        kinds = ("running_mean", "running_var", "weight", "bias")
        mean, var, gain, bias = (weights[f"{norm}.{kind}"].double() for kind in kinds)
        return functional.batch_norm(x, mean, var, gain, bias, eps=1e-3)

    x = (tiles.permute(0, 3, 1, 2).double() - 127) / 128
    x = conv(x, "_conv_stem", "_bn0", 2).clamp(0, 6)
    number, means = 0, []
    for expand, channels, repeats, stride, _ in STAGES:
        for repeat in range(repeats):
            block, before = f"_blocks.{number}.", x
            if expand > 1:
                x = conv(x, block + "_expand_conv", block + "_bn0").clamp(0, 6)
            step = stride if repeat == 0 else 1
            x = conv(x, block + "_depthwise_conv", block + "_bn1", step).clamp(0, 6)
            x = conv(x, block + "_project_conv", block + "_bn2")
            x = x + before if repeat else x
            number += 1
        if channels >= 40:
            means.append(x.mean((2, 3)))
    return torch.cat(means, 1)


def test_the_embedding_is_that_of_the_package_weights(
    model: Lite0, weights: Weights, example_tiles: torch.Tensor
) -> None:
    expected = reference(example_tiles, weights)
    with torch.inference_mode():
        found = model(example_tiles)[1]
    assert found.shape == (len(example_tiles), 424)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


def test_the_saved_model_gives_what_the_module_gives(
    model: Lite0, checkpoint: Path, example_tiles: torch.Tensor
) -> None:
    runner = open_runner(checkpoint, device="cpu", spec=get_spec("lite0"))
    with torch.inference_mode():
        expected = model(example_tiles)
    for found, want in zip(runner(example_tiles), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_built_in_model_runs_its_network_and_gives_the_bits_of_its_file(
    example_tiles: torch.Tensor,
) -> None:
    model = build_server_model("lite0", use_compiled=False)
    assert model.checkpoint_path is not None
    assert model.checkpoint_path.suffix == ".pt2"
    requests = [
        ModelRequest.from_pixels(tile.numpy(), slide_name="", x=0, y=0) for tile in example_tiles
    ]
    samples = [model.prepare_sample(request) for request in requests]
    answers = model.forward_batch(samples, requests, "prediction_with_embedding")
    runner = open_runner(model.checkpoint_path, device="cpu", spec=model.model_spec)
    with torch.inference_mode():
        predictions, embeddings = runner(example_tiles)
    for answer, prediction, embedding in zip(answers, predictions, embeddings, strict=True):
        assert np.array_equal(answer.output, prediction.numpy())
        assert answer.embedding is not None
        assert np.array_equal(answer.embedding, embedding.numpy())


def test_loading_the_built_in_model_does_not_import_torchs_tracer(checkpoint: Path) -> None:
    code = (
        "import sys; from bioptimus.runtime import build_server_model; "
        "build_server_model('lite0', use_compiled=False); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture
def example_tiles(example_slide: Path) -> torch.Tensor:
    """Four tiles of the example slide, (4, 224, 224, 3) uint8."""
    import openslide

    with openslide.OpenSlide(example_slide) as slide:
        corners = ((200, 300), (900, 700), (1500, 2000), (400, 2500))
        tiles = [np.asarray(slide.read_region(at, 0, (224, 224)).convert("RGB")) for at in corners]
    return torch.from_numpy(np.stack(tiles))


def measures(model: Lite0, tile: torch.Tensor) -> dict[str, float]:
    with torch.inference_mode():
        values = model(tile[None])[0][0].tolist()
    return dict(zip(LITE0_MEASURES, values, strict=True))


def painted(*rgb: int) -> torch.Tensor:
    return torch.tensor(rgb, dtype=torch.uint8).expand(224, 224, 3).contiguous()


def test_measures_of_plain_colours(model: Lite0) -> None:
    white = measures(model, painted(255, 255, 255))
    assert white == pytest.approx(dict.fromkeys(LITE0_MEASURES, 0.0) | {"brightness": 1.0})
    black = measures(model, painted(0, 0, 0))
    assert (black["brightness"], black["saturation"], black["focus"]) == (0, 0, 0)
    assert black["haematoxylin_od"] < 4.8
    red = measures(model, painted(255, 0, 0))
    assert red["saturation"] == pytest.approx(1)
    assert red["brightness"] == pytest.approx(0.299, abs=1e-4)
    assert red["eosin_od"] < 2.7


@pytest.mark.parametrize(
    ("vector", "stain", "other"),
    [((0.65, 0.70, 0.29), "haematoxylin_od", "eosin_od"),
     ((0.07, 0.99, 0.11), "eosin_od", "haematoxylin_od")],
)  # fmt: skip
def test_a_pure_stain_is_found_at_its_density_and_the_other_is_not(
    model: Lite0, vector: tuple[float, ...], stain: str, other: str
) -> None:
    unit = np.array(vector) / np.linalg.norm(vector)
    found = measures(model, painted(*np.round(255 * 10 ** (-0.5 * unit)).astype(int)))
    assert found[stain] == pytest.approx(0.5, abs=0.01)
    assert found[other] == pytest.approx(0, abs=0.01)


def test_nuclear_area_is_the_area_of_dark_discs(model: Lite0) -> None:
    stroma = np.full((224, 224, 3), (225, 160, 190), np.uint8)
    for x in range(16, 224, 32):
        for y in range(16, 224, 32):
            cv2.circle(stroma, (x, y), 8, (90, 70, 140), -1)
    share = float((stroma[..., 0] == 90).mean())
    found = measures(model, torch.from_numpy(stroma))["nuclear_area_fraction"]
    assert found == pytest.approx(share, abs=0.03)


def test_measures_order_real_patches_as_people_do(model: Lite0, shared_slides: Path) -> None:
    found = {name: measures(model, tile) for name, tile in he_tiles(shared_slides).items()}
    for values in found.values():
        assert 0 <= values["nuclear_area_fraction"] <= 1
        assert 0 <= values["haematoxylin_od"] < 1.0
    nuclei = {name: values["nuclear_area_fraction"] for name, values in found.items()}
    assert nuclei["no-tissue2"] < 0.01
    assert nuclei["low-nuclei-score-level0"] < 0.1
    assert nuclei["medium-nuclei-score-level0"] < 0.15
    assert 0.15 < nuclei["template1"] < 0.4
    assert nuclei["high-nuclei-score-level0"] > 0.4
    assert found["no-tissue2"]["haematoxylin_od"] < 0.06
    assert found["no-tissue2"]["brightness"] > 0.9
    assert found["high-nuclei-score-level0"]["haematoxylin_od"] > 0.4


def test_focus_falls_with_blur(model: Lite0, example_tiles: torch.Tensor) -> None:
    tissue = [tile for tile in example_tiles if measures(model, tile)["brightness"] < 0.9]
    assert len(tissue) >= 2
    for tile in tissue:
        sharp, *blurred = (
            measures(model, torch.from_numpy(cv2.GaussianBlur(tile.numpy(), (0, 0), sigma)))
            if sigma
            else measures(model, tile)
            for sigma in (0, 1, 2, 4)
        )
        values = [sharp["focus"], *(each["focus"] for each in blurred)]
        assert values == sorted(values, reverse=True)
        assert values[0] > 2 > 1.5 > values[-1]


def test_the_file_describes_itself(checkpoint: Path) -> None:
    info = inspect_archive(checkpoint)
    assert info.spec is not None
    assert info.spec.with_(source_sha256="") == get_spec("lite0")
    assert len(info.spec.source_sha256) == 64


def test_ten_processes_at_once_get_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys; sys.stdin.read()\n"  # all are let go at once
        "from bioptimus.runtime.builtin import builtin_checkpoint\n"
        "from bioptimus.runtime.archive import file_sha256\n"
        "print(file_sha256(builtin_checkpoint().path))"
    )
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "BIOPTIMUS_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(builtin.__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, text=True,
        )
        for _ in range(10)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    answers = set()
    for process in processes:
        assert process.stdout is not None
        assert process.stderr is not None
        answers.add(process.stdout.read().strip())
        assert process.stderr.read() == ""
        assert process.wait() == 0
        process.stdout.close()
        process.stderr.close()
    assert len(answers) == 1
    assert len(answers.pop()) == 64
    models = [path.name for path in (tmp_path / "models").iterdir()]
    assert sorted(Path(name).suffix for name in models) == [".lock", ".pt2"]


def test_a_damaged_cached_file_is_made_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path))
    path = tmp_path / "models" / checkpoint.name
    path.parent.mkdir()
    path.write_bytes(checkpoint.read_bytes()[:100_000])
    assert builtin_checkpoint().path == path
    assert path.read_bytes() == checkpoint.read_bytes()


def test_without_a_lock_the_file_is_made_all_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path))
    (tmp_path / "models" / checkpoint.name).with_suffix(".lock").mkdir(parents=True)
    assert builtin_checkpoint().path.read_bytes() == checkpoint.read_bytes()


def test_weights_of_another_network_are_refused(weights: Weights) -> None:
    with pytest.raises(CheckpointError, match="do not fit"):
        lite0_from_weights({key: value for key, value in weights.items() if "_bn0" not in key})
    with pytest.raises(CheckpointError, match="do not fit"):
        lite0_from_weights(weights | {"_conv_stem.weight": torch.zeros(8, 3, 3, 3)})
