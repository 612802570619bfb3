"""An export is compared with its network before it gets its name, and says what it is."""

import json
import math
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bioptimus.errors import CheckpointError, UsageError
from bioptimus.inference.schemas import ModelRequest
from bioptimus.models.facts import FACTS
from bioptimus.models.types import ModelSpec
from bioptimus.runtime import export, machine, sources
from bioptimus.runtime.archive import file_sha256, inspect_archive
from bioptimus.runtime.export import Agreement, TileModel, agreement, export_module
from bioptimus.runtime.loader import build_server_model
from bioptimus.runtime.sources import (
    export_source,
    from_folder,
    from_function,
    from_hub,
    sample_tiles,
)
from bioptimus.runtime.vit import random_vit
from bioptimus.tiles import TileSpec
from cli.main import main
from tests.conftest import ROOT
from tests.test_vit import hub_folder, narrow, write_safetensors
from tests.tiny_models import TinyRNA, random_tiles

COLOURED = ModelSpec(
    name="flat", tile=TileSpec(size_px=8), mean=(0.5, 0.6, 0.7), std=(0.2, 0.3, 0.4)
)


class Flat(nn.Module):
    """Normalised (N, 3, 8, 8) → (N, 5)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(192, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(images.flatten(1))
        return result


class Fickle(Flat):
    """Gives something else at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(images).roll(self.calls, 1) * self.calls


def test_tiles_are_normalised_inside_the_file(tmp_path: Path) -> None:
    report = export_module(Flat(), COLOURED, tmp_path / "flat.pt2")
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (COLOURED.mean, COLOURED.std))
    images = (random_tiles(3).permute(0, 3, 1, 2) / 255 - mean) / std
    expected = Flat()(images).detach()
    model = build_server_model(report.path)
    requests = [
        ModelRequest.from_pixels(tile.numpy(), slide_name="s", x=0, y=0) for tile in random_tiles(3)
    ]
    samples = [model.prepare_sample(request) for request in requests]
    rows = [answer.output for answer in model.forward_batch(samples, requests, "embedding")]
    found = torch.from_numpy(np.stack(rows))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_the_user_left_open_is_filled_in(tmp_path: Path) -> None:
    report = export_module(Flat(), COLOURED, tmp_path / "flat.pt2")
    assert report.spec.embedding_dim == 5
    assert inspect_archive(report.path).spec == report.spec
    assert report.worst_random > 0.999999
    assert report.worst_real is None


def test_a_file_that_differs_from_its_network_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "other.pt2"
    path.write_text("what was here before")
    with pytest.raises(CheckpointError, match=r"other\.pt2: not written: its results differ"):
        export_module(WhenTraced(2.0), COLOURED, path)
    assert path.read_text() == "what was here before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["other.pt2"]


def test_a_network_that_gives_something_else_in_each_call_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="flat: the network gives something else in each"):
        export_module(Fickle(), COLOURED, tmp_path / "fickle.pt2")


def test_agreement_is_that_of_the_worst_row_in_direction_and_in_length() -> None:
    a = torch.ones(2, 3)
    assert agreement([a], [a]) == agreement([a * 0], [a * 0]) == agreement([], []) == Agreement()
    of_no_use = Agreement(cosine=-1, length_error=math.inf)
    assert agreement([a], [a[:, :2]]) == agreement([a], [a * float("nan")]) == of_no_use
    turned = agreement([a], [torch.tensor([[1.0, 1, 1], [-1, -1, -1]])])
    assert (turned.cosine, turned.length_error) == pytest.approx((-1, 0))
    longer = agreement([a, a], [a, torch.tensor([[1.0, 1, 1], [3, 3, 3]])])
    assert (longer.cosine, longer.length_error) == pytest.approx((1, 2))
    assert agreement([a * 0], [a]).length_error == math.inf


@pytest.mark.parametrize(
    ("precision", "cosine", "length_error", "good"),
    [
        ("fp32", 0.9999, 0.0141, True), ("fp32", 0.99989, 0, False), ("fp32", 1, 0.0142, False),
        ("bf16", 0.999, 0.0447, True), ("fp16", 0.9989, 0, False), ("fp16", 1, 0.0448, False),
    ],
)  # fmt: skip
def test_the_length_may_be_off_by_no_more_than_the_direction(
    precision: str, cosine: float, length_error: float, *, good: bool
) -> None:
    assert Agreement(cosine=cosine, length_error=length_error).within(precision) is good


class WhenTraced(Flat):
    """Gives its results times something in the file, and as they are when called."""

    def __init__(self, factor: float, scale: float = 1.0) -> None:
        super().__init__()
        self.factor, self.scale = factor, scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result = super().forward(images) * self.scale
        return result * self.factor if torch.compiler.is_exporting() else result


@pytest.mark.parametrize(
    ("network", "precision", "words", "advice"),
    [
        (WhenTraced(2.0), "fp32", "length off by 1e+02 %", "does the network give the same in"),
        (WhenTraced(2.0), "bf16", "length off by 1e+02 %", "try --precision fp32"),
        (WhenTraced(1.0, 1e6), "fp16", "it gives NaN, infinity or", "try --precision bf16"),
        (WhenTraced(math.nan), "bf16", "it gives NaN, infinity or", "try --precision fp32"),
        (WhenTraced(math.nan), "fp32", "it gives NaN, infinity or", "does the network give the"),
        (WhenTraced(1.0, math.nan), "fp32", "the network itself gives NaN", "are its weights"),
    ],
)
def test_a_file_of_another_scale_or_of_nan_is_refused_with_advice_that_fits(
    tmp_path: Path, network: nn.Module, precision: str, words: str, advice: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        export_module(network, COLOURED.with_(precision=precision), tmp_path / "file.pt2")
    assert words in str(caught.value)
    assert advice in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class NamesFloat32(Flat):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.float())


def test_where_float64_cannot_be_had_the_report_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export_module(NamesFloat32(), COLOURED, tmp_path / "a.pt2")
    assert first.compared_to.startswith("float32 (in float64 it fails: ")
    assert first.worst_random == 1
    monkeypatch.setattr(export, "free_memory", lambda _: 4000)
    second = export_module(Flat(), COLOURED, tmp_path / "b.pt2")
    assert second.compared_to == "float32 (float64 takes 0.0 GB more than there was memory for)"
    monkeypatch.setattr(export, "free_memory", lambda _: 5000)  # 965 weights take 3,860 bytes more
    assert export_module(Flat(), COLOURED, tmp_path / "c.pt2").compared_to == "float64"


def test_a_network_that_fails_is_told_from_one_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"flat: the network fails on 9 px tiles: mat1 and"):
        export_module(Flat(), COLOURED.with_(tile=TileSpec(size_px=9)), tmp_path / "a.pt2")


def test_free_memory_is_what_the_system_and_its_container_leave(tmp_path: Path) -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.free_memory("cpu") <= everything
    assert machine._left_in_container(tmp_path, otherwise=7) == 7
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("active_file 1\ninactive_file 50\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._left_in_container(tmp_path, otherwise=7) == 7
    (tmp_path / "memory.max").write_text("1000\n")
    assert machine._left_in_container(tmp_path, otherwise=7) == 350


_HAS_NO_ROOM = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # a write beyond fails, as on a full disk
from cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    """torch's writer would end the process, with a page of addresses."""
    words = (
        "models",
        "export",
        "tests.tiny_models:flat",
        "--name",
        "flat",
        "--tile-px",
        "8",
        "--mpp",
        "0.5",
    )
    colours = ("--mean", "0,0,0", "--std", "1,1,1")
    done = subprocess.run(
        [sys.executable, "-c", _HAS_NO_ROOM, *words, *colours, "-o", tmp_path / "f.pt2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "BIOPTIMUS_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 1
    told = f"error: {tmp_path / 'f.pt2'}: cannot be written: File too large; mend that, or choose"
    assert done.stderr == f"{told} another --out\n"
    assert [path.name for path in tmp_path.iterdir()] in ([], ["cache"])


def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.pt2").mkdir()
    # And not first that --overwrite would help.
    with pytest.raises(UsageError, match=r"^mine\.pt2: is a folder; name the file to write"):
        export_source(
            "no:such", None, facts_key=None, overrides={"name": "mine"}, device="cpu", slide=None,
            hub=False, accept_licence=False,
        )  # fmt: skip
    (tmp_path / "file").touch()
    network = Fickle()
    with pytest.raises(CheckpointError, match=r"/file/f\.pt2: cannot be written: Not a directory"):
        export_module(network, COLOURED, tmp_path / "file" / "f.pt2")
    assert network.calls == 0
    with pytest.raises(
        UsageError, match=r"is a folder; name the file to write, such as --out .*/model"
    ):
        export_source(
            "no:such", tmp_path, facts_key=None, overrides={}, device="cpu", slide=None, hub=False,
            accept_licence=False,
        )  # fmt: skip


_EXPORTS = """
import sys
from pathlib import Path
import torch
from bioptimus.runtime.sources import export_source
torch.set_num_threads(int(sys.argv[2]))
torch.__version__ = torch.torch_version.TorchVersion("2.13.0+" + sys.argv[3])
for precision in ("fp32", "bf16"):
    report = export_source(
        sys.argv[1], Path(precision + ".pt2"), facts_key=None, device="cpu", slide=None, hub=False,
        overrides={"precision": precision, "mpp": 0.5}, accept_licence=False,
    )
    print(report.worst_random, report.worst_length_error)
"""


def test_another_processor_build_and_folder_give_the_same_bytes(tmp_path: Path) -> None:
    facts = FACTS["h0"]
    assert facts.vit is not None
    # Positions of another image, which have to be resampled.
    network = random_vit(replace(narrow(facts.vit), image_px=70), depth=2)
    weights = tmp_path / "weights"
    weights.mkdir()
    torch.save(network.state_dict(), weights / "pytorch_model.bin")
    config = {"mean": [0.5] * 3, "std": [0.5] * 3, "num_attention_heads": 2, "image_size": 56}
    (weights / "config.json").write_text(json.dumps(config))
    old = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "PYTHONHASHSEED": "1"}
    processes = []
    for name, threads, build, environment in (("a", "1", "cpu", {}), ("b", "2", "cu126", old)):
        (tmp_path / name).mkdir()
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _EXPORTS, weights, threads, build],
                cwd=tmp_path / name,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    reached = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    if platform.machine() == "x86_64":
        assert reached[0] != reached[1], "no other processor was played"
    for file in ("fp32.pt2", "bf16.pt2"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 0.999), ("fp16", 0.999)])
def test_half_precision_stays_close_to_double_and_halves_the_file(
    tmp_path: Path, precision: str, limit: float, example_slide: Path
) -> None:
    facts = FACTS["h0"]
    assert facts.vit is not None
    network = random_vit(narrow(facts.vit), depth=2)
    spec = facts.spec().with_(embedding_dim=0, precision=precision)
    tiles = sample_tiles(example_slide, spec)
    exact = TileModel(random_vit(narrow(facts.vit), depth=2).double(), spec, dtype=torch.float64)
    with torch.inference_mode():
        double = exact(tiles)[0]
    assert double.dtype == torch.float64
    report = export_module(network, spec, tmp_path / "half.pt2", real_tiles=tiles)
    assert report.worst_real is not None
    assert report.worst_real > limit
    model = build_server_model(report.path)
    found = model._runner(tiles)[0]
    assert found.dtype == torch.float32
    worst = float(functional.cosine_similarity(found.double(), double).min())
    assert worst > limit
    assert report.worst_real == pytest.approx(worst, abs=1e-9)
    assert report.spec.precision == precision
    stored = sum(p.numel() for p in exact.parameters()) * 2
    assert report.path.stat().st_size < stored * 1.2 + 300_000


def test_a_float_model_is_exported_in_the_vendors_layout(tmp_path: Path) -> None:
    spec = COLOURED.with_(input_layout="nchw_float32")
    report = export_module(Flat(), spec, tmp_path / "f.pt2", real_tiles=random_tiles(2))
    signature = inspect_archive(report.path).signature
    assert signature is not None
    assert str(signature.inputs[0]) == "float32 (N, 3, 8, 8)"


def test_a_model_of_genes_takes_rna_beside_the_tile(tmp_path: Path) -> None:
    spec = COLOURED.with_(
        output_kind="prediction_and_embedding", rna_dim=7,
        output_names=("A", "B"), prediction_dim=2, input_genes=tuple("abcdefg"),
    )  # fmt: skip

    class Genes(TinyRNA):
        def forward(
            self, tiles: torch.Tensor, rna: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(tiles.permute(0, 2, 3, 1), rna)

    report = export_module(Genes(), spec, tmp_path / "g.pt2", real_tiles=random_tiles(3))
    info = inspect_archive(report.path)
    assert info.spec is not None
    assert info.spec.output_names == ("A", "B")
    assert info.spec.embedding_dim == 5
    with pytest.raises(CheckpointError, match=r"returns a tuple of \(N, 2\) and \(N, 5\); for"):
        export_module(Genes(), COLOURED.with_(rna_dim=7), tmp_path / "h.pt2")


class Returns(Flat):
    """Returns what a function makes of (N, 5)."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.form(super().forward(images))
        return found


PAIR = COLOURED.with_(output_kind="prediction_and_embedding")
NAMED = PAIR.with_(output_names=("a", "b", "c"), prediction_dim=3)


@pytest.mark.parametrize(
    ("spec", "form", "words"),
    [
        (COLOURED, torch.fft.fft, "returns complex numbers; for --gives embedding it must"),
        (COLOURED, lambda e: {"x": e}, "returns a dict with the keys x; for --gives embedding it"),
        (COLOURED, lambda e: [], "returns a list of nothing; for"),
        (COLOURED, lambda e: (e, "x"), "returns a tuple of (4, 5) and a str; for"),
        (COLOURED, lambda e: None, "returns a NoneType; for"),
        (COLOURED, lambda e: e[:, 0], "returns (N,); for"),
        (COLOURED, lambda e: e.mean(0), "returns (5,); for"),
        (COLOURED, lambda e: e[:, :0], "returns (N, 0); for"),
        (COLOURED, lambda e: e[:, :, None], "returns (N, 5, 1); for"),
        (COLOURED, lambda e: e[:, :, None], "tokens (N, T, D) with --pooling"),
        (PAIR, lambda e: e, "must return a pair, the prediction (N, K) first"),
        (NAMED, lambda e: (e, e[:, :3]), "names 3; the prediction must come first, then the emb"),
        (NAMED, lambda e: (e[:, :2], e), "of 2 values, and --output-names names 3; give as many"),
        (COLOURED.with_(output_kind="mask"), lambda e: e, "(N, 1, H, W) of the tile's height and"),
    ],
)
def test_a_network_that_returns_something_else_is_told_what_and_what_is_wanted(
    spec: ModelSpec, form: Callable[[torch.Tensor], Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        export_module(Returns(form), spec, tmp_path / "m.pt2")
    assert words in str(caught.value)
    assert str(caught.value).startswith("flat: the network returns ")
    assert list(tmp_path.iterdir()) == []


class AcrossTheBatch(nn.Module):
    """A transformer that takes the tiles for a sequence: easily done, and mixes them thinly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.tokens(images).flatten(2).transpose(1, 2))
        return found.mean(1)


@pytest.mark.parametrize(
    "network",
    [
        Returns(lambda e: e - e.mean(0)),
        Returns(lambda e: e + 0.01 * e.roll(1, 0)),
        nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4, track_running_stats=False),
                      nn.Flatten()),
        AcrossTheBatch(),
    ],
    ids=("centred", "thinly", "statistics", "attention"),
)  # fmt: skip
def test_a_network_that_mixes_the_tiles_of_a_batch_is_refused(
    network: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="gives a tile alone something else than the same"):
        export_module(network, COLOURED, tmp_path / "m.pt2")


class Thresholded(nn.Module):
    """Tissue is darker than a threshold, which in float64 is not that of a byte any more."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift
        self.at = nn.Parameter(torch.tensor(51 / 255))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        at = self.at + self.shift * torch.compiler.is_exporting()
        return (images[:, 0] < at).to(images.dtype)


MASKS = COLOURED.with_(
    output_kind="mask", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), tile=TileSpec(size_px=64)
)


def test_a_mask_cut_inside_may_differ_at_its_threshold(tmp_path: Path) -> None:
    report = export_module(Thresholded(), MASKS, tmp_path / "m.pt2")
    assert 0 < report.worst_differing_share < 0.01, "what lies at the threshold rounds both ways"
    assert report.worst_random == 1


@pytest.mark.parametrize("shift", [0.03, 0.2, 5.0, -5.0])
def test_a_mask_cut_at_another_threshold_is_not_written(tmp_path: Path, shift: float) -> None:
    with pytest.raises(CheckpointError, match=r"its masks differ .* of the pixels differ; at most"):
        export_module(Thresholded(shift), MASKS, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_only_masks_of_two_values_are_compared_by_their_pixels() -> None:
    mask = torch.zeros(2, 10, 10)
    mask[0, :5] = 1
    flipped = mask.clone()
    flipped[1, 0, 0] = 1
    assert agreement([mask], [flipped]) == Agreement(differing_share=0.01)
    assert Agreement(differing_share=0.01).within("fp32")
    assert not Agreement(differing_share=0.011).within("bf16")
    # Probabilities, two roundings of one value, and rows of two values that are no mask.
    assert agreement([mask * 0.5 + 0.1], [flipped]).length_error > 0.1
    assert agreement([mask * 0 + 0.3], [mask * 0 + 0.3000001]).within("fp32")
    rows = mask.flatten(1)
    assert agreement([rows], [flipped.flatten(1)]).length_error == math.inf


class InDouble(Flat):
    """Casts its images, as if its weights stayed in float64."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.double())


def test_a_network_that_runs_in_one_dtype_alone_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^m.pt2: not written: in fp32 the forward .* dtype"):
        export_module(InDouble(), COLOURED, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_mask_may_come_with_an_axis_of_its_one_channel(tmp_path: Path) -> None:
    report = export_module(
        nn.Conv2d(3, 1, 3, padding=1), COLOURED.with_(output_kind="mask"), tmp_path / "m.pt2"
    )
    signature = inspect_archive(report.path).signature
    assert signature is not None
    assert [str(output) for output in signature.outputs] == ["float32 (N, 8, 8)"]
    with pytest.raises(CheckpointError, match=r"returns \(N, 2, 8, 8\); for --gives mask"):
        export_module(nn.Conv2d(3, 2, 1), report.spec, tmp_path / "n.pt2")


def test_a_network_that_branches_on_its_tiles_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        export_module(Returns(lambda e: e if e.sum() > 0 else e * 2), COLOURED, tmp_path / "m.pt2")
    assert "cannot trace it: Could not guard on data-dependent" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "def forward" not in capfd.readouterr().err


class FixesTheBatch(nn.Module):
    """Takes the number of tiles in the way given, as many a class token's expansion does."""

    def __init__(self, count: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.count = count

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(2).mean(2) + torch.ones(1, 3).expand(self.count(images), 3)


@pytest.mark.parametrize(
    "count", [len, lambda images: images.shape[0] if images.shape[0] > 3 else len(images)]
)
def test_a_network_that_fixes_the_number_of_tiles_is_told_what_to_write(
    tmp_path: Path, count: Callable[[torch.Tensor], int]
) -> None:
    with pytest.raises(
        CheckpointError, match=r"number of tiles in a batch.*x\.shape\[0\], where len"
    ):
        export_module(FixesTheBatch(count), COLOURED, tmp_path / "m.pt2")


def test_the_export_says_which_tiles_the_model_takes_and_what_it_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["models", "export", *FLAT, "-o", str(tmp_path / "m.pt2"), "--gives", "prediction"]
    names = tmp_path / "names.txt"
    names.write_text("\ufeffé\nb\nc\nd\nf\n", encoding="utf-8")  # as spreadsheets write it
    assert main([*words, "--mpp", "0.25", "--output-names", str(names)]) == 0
    told = capsys.readouterr().err
    assert "takes tiles of              8 px at 0.25 um/px\n" in told
    assert "gives                       prediction 5\n" in told
    spec = inspect_archive(tmp_path / "m.pt2").spec
    assert spec is not None
    assert spec.output_names[0] == "é"
    names.write_text("a\nb\nc\na\nf\n")
    assert main([*words, "--output-names", str(names), "--overwrite"]) == 2
    assert capsys.readouterr().err.startswith("error: output name 'a' is there more than once")


def test_a_folder_in_the_layout_of_h_optimus_0_becomes_a_model(
    tmp_path: Path, example_slide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = FACTS["h0"]
    assert facts.vit is not None
    shape = narrow(facts.vit)
    network = random_vit(shape, depth=2)
    folder = hub_folder(
        tmp_path / "H-optimus-0", shape, network.state_dict(),
        architecture="vit_giant_patch14_reg4_dinov2", num_classes=0,
        pretrained_cfg={"mean": facts.mean, "std": facts.std, "input_size": [3, 224, 224]},
    )  # fmt: skip
    out = tmp_path / "h0.pt2"
    # By the configuration alone: the table's width is that of the full model.
    arguments = ["models", "export", str(folder), "-o", str(out), "--name", "h0-small",
                 "--mpp", "0.5", "--verify", str(example_slide),
                 "--licence", "Apache-2.0"]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert "worst cosine, real tiles    1.0000000" in said.err
    assert "computes in                 fp32 (for a GPU: --precision bf16 or fp16)" in said.err
    info = inspect_archive(out)
    assert info.spec is not None
    assert (info.spec.name, info.spec.licence, info.spec.prefix_tokens) == (
        "h0-small", "Apache-2.0", 5,
    )  # fmt: skip
    assert info.spec.source_sha256 == file_sha256(folder / "model.safetensors")
    tiles = sample_tiles(example_slide, info.spec)
    assert tiles.shape == (4, 224, 224, 3)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (facts.mean, facts.std))
    with torch.inference_mode():
        expected = network((tiles.permute(0, 3, 1, 2) / 255 - mean) / std)[:, 0]
    found = build_server_model(out)._runner(tiles)[0]
    assert functional.cosine_similarity(found, expected).min() > 0.999999


def test_a_file_names_no_folder_of_the_machine_that_made_it(tmp_path: Path) -> None:
    facts = FACTS["uni"]
    assert facts.vit is not None
    shape = narrow(facts.vit)
    weights = random_vit(shape, depth=1).state_dict()
    given = {"name": "m", "mpp": 0.5, "mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    made = []
    for person in ("lovelace", "hopper"):
        (tmp_path / person).mkdir()
        folder = hub_folder(tmp_path / person / f"weights-of-{person}", shape, weights)
        source = from_folder(folder, overrides=given)
        out = tmp_path / person / "m.pt2"
        export_module(source.network, source.spec, out)
        with zipfile.ZipFile(out) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        texts = [data for name, data in members.items() if "/weights/" not in name]
        for word in (person, str(tmp_path), str(ROOT), "site-packages"):
            assert not any(word.encode() in text for text in texts), word
        made.append(out.read_bytes())
    assert made[0] == made[1], "the same weights are the same model"


FLAT = (
    "tests.tiny_models:flat",
    *("--tile-px", "8", "--mpp", "0.5", "--mean", "0,0,0", "--std", "1,1,1"),
)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (FLAT, "flat.pt2"),
        ((*FLAT, "--name", "mine"), "mine.pt2"),
        ((*FLAT, "--as", "h0"), "h0.pt2"),
        ((*FLAT, "-o", "below/any.pt2"), "below/any.pt2"),
        (("weights-of-a-model",), "weights-of-a-model.pt2"),
        (("kaiko-s16", "--from-hub", "--accept-licence"), "kaiko-s16.pt2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_that_is_there_is_refused_before_weights_are_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    name: str,
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    for reads in ("from_folder", "from_function", "from_hub"):
        monkeypatch.setattr(sources, reads, read)
    monkeypatch.chdir(tmp_path)
    for folder in ("below", "weights-of-a-model"):
        (tmp_path / folder).mkdir()
    (tmp_path / name).write_bytes(b"weeks of work")
    assert main(["models", "export", *words]) == 2
    told = f"error: {name}: is there already; pass --overwrite, or another name with --out\n"
    assert capsys.readouterr().err == told
    assert (tmp_path / name).read_bytes() == b"weeks of work"


def test_a_device_that_is_not_there_is_refused_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sources, "from_function", lambda *_: pytest.fail("weights are read"))
    assert main(["models", "export", *FLAT, "--device", "cuda:1"]) == 2
    assert capsys.readouterr().err.startswith("error: device cuda:1: torch sees no NVIDIA GPU here")


def test_a_file_that_is_there_is_replaced_if_so_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat.pt2").write_bytes(b"an older one")
    assert main(["models", "export", *FLAT, "--overwrite"]) == 0
    spec = inspect_archive(tmp_path / "flat.pt2").spec
    assert spec is not None
    assert spec.name == "flat"


def test_the_configuration_must_name_mean_and_std(tmp_path: Path) -> None:
    facts = FACTS["uni"]
    assert facts.vit is not None
    shape = narrow(facts.vit)
    folder = hub_folder(tmp_path / "m", shape, random_vit(shape, depth=2).state_dict())
    with pytest.raises(CheckpointError, match="names no mean and std"):
        from_folder(folder)
    colours = {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    with pytest.raises(CheckpointError, match="names no scale; pass --mpp"):
        from_folder(folder, overrides=colours)
    spec = from_folder(folder, overrides={**colours, "mpp": 1.0}).spec
    assert spec.mean == (0.1, 0.2, 0.3)
    assert spec.tile == TileSpec(size_px=shape.image_px, mpp=1.0)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        from_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json; say what it is: --as h0"):
        from_folder(folder)


def test_an_architecture_that_needs_timm_says_so(tmp_path: Path) -> None:
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):
        pass
    else:
        pytest.skip("timm is here")
    folder = tmp_path / "resnet"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": "resnet50"}))
    write_safetensors(folder / "model.safetensors", {"conv1.weight": torch.zeros(64, 3, 7, 7)})
    with pytest.raises(CheckpointError, match=r"resnet50: needs timm.*bioptimus-wsi\[export\]"):
        from_folder(folder, facts_key="resnet50")
    with pytest.raises(CheckpointError, match="not buildable by timm"):
        from_folder(folder, facts_key="ctranspath")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_heads": 2}, ""),
        ({"num_heads": 5}, "weights: 5 attention heads do not divide tokens of 32; state num_at"),
        ({}, "weights: unknown how many heads there are for tokens of 32; state num_attention_h"),
    ],
)
def test_heads_are_taken_from_the_configuration_or_asked_for(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    facts = FACTS["h0"].vit
    assert facts is not None
    shape = replace(narrow(facts), width=32, heads=2, image_px=56, patch_px=14)
    write_safetensors(folder / "model.safetensors", random_vit(shape, depth=1).state_dict())
    more = {"architecture": "vit_mine", "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 56}
    (folder / "config.json").write_text(json.dumps({**more, **config}))
    if words:
        with pytest.raises(CheckpointError, match=words):
            from_folder(folder, overrides={"mpp": 0.5})
    else:
        from_folder(folder, overrides={"mpp": 0.5})


def test_a_python_function_gives_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_network.py").write_text(
        "import torch\n"
        "def build(): return torch.nn.Flatten()\n"
        "def broken(): raise KeyError('weights')\n"
        "def other(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    source = from_function("my_network:build", COLOURED)
    assert isinstance(source.network, nn.Flatten)
    assert source.spec.source == "my_network:build"
    with pytest.raises(UsageError, match="cannot be imported"):
        from_function("my_network:missing", COLOURED)
    with pytest.raises(UsageError, match="cannot be imported"):
        from_function("no_such_module:build", COLOURED)
    with pytest.raises(CheckpointError, match=r"broken: failed: KeyError"):
        from_function("my_network:broken", COLOURED)
    with pytest.raises(CheckpointError, match="returned int"):
        from_function("my_network:other", COLOURED)


def test_a_function_that_draws_its_weights_at_random_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"module.0.weight": torch.ones(2, 3)}, tmp_path / "checkpoint.pth")
    (tmp_path / "my_vit.py").write_text(
        "import torch\n"
        "class Vit(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Linear(3, 2, bias=False), torch.nn.BatchNorm1d(2))\n"
        "def lenient():\n"
        "    network = Vit()\n"
        "    network.load_state_dict(torch.load('checkpoint.pth'), strict=False)\n"
        "    return network\n"
        "def loads():\n"
        "    network = Vit()\n"
        "    weights = torch.load('checkpoint.pth')\n"
        "    network[0].weight.data = weights['module.0.weight']\n"
        "    return network\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("Vit", "lenient"):
        wanted = (
            rf"{name}: 1 of its 6 weights are others each time.*such as 0\.weight: have it load"
        )
        with pytest.raises(CheckpointError, match=wanted):
            from_function(f"my_vit:{name}", COLOURED)
    assert from_function("my_vit:loads", COLOURED).spec.source == "my_vit:loads"


def test_weights_that_are_nan_are_told_as_that_and_not_as_drawn_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, last):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(192, 5, bias=False))\n"
        "        self.register_buffer('unused', torch.full((2,), torch.nan))\n"
        "        self[1].weight.data = torch.linspace(0, 1, 960).reshape(5, 192)\n"
        "        self[1].weight.data[4, 191] = last\n"
        "def right(): return Net(1.0)\n"
        "def broken(): return Net(torch.nan)\n"
        "def drawn(): return Net(torch.rand(1).item())\n"
    )
    monkeypatch.chdir(tmp_path)
    source = from_function("my_net:right", COLOURED)
    assert export_module(source.network, source.spec, tmp_path / "r.pt2").worst_random > 0.9999
    source = from_function("my_net:broken", COLOURED)
    wanted = "itself gives NaN or infinity; 2 of its 2 weights hold NaN, such as unused: is the ch"
    with pytest.raises(CheckpointError, match=wanted):
        export_module(source.network, source.spec, tmp_path / "b.pt2")
    with pytest.raises(CheckpointError, match=r"drawn: 1 of its 2 weights .* such as 1\.weight"):
        from_function("my_net:drawn", COLOURED)


def test_a_model_that_cannot_be_built_is_not_downloaded() -> None:
    with pytest.raises(UsageError, match="not buildable"):
        from_hub("conch", accept_licence=True)


def test_weights_of_another_model_are_named_by_their_width(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="flat: the network gives 5 values, flat gives 6"):
        export_module(Flat(), COLOURED.with_(embedding_dim=6), tmp_path / "flat.pt2")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing-here", "neither a folder"),
        ("uni", "add --from-hub"),
        ("vit.pth", "write a function that builds it and loads them"),
        ("m:f", "--mpp and --mean and --std"),
    ],
)
def test_a_source_that_is_none_says_what_one_is(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit.pth").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        export_source(
            source, None, facts_key=None, overrides={}, device="cpu", slide=None, hub=False,
            accept_licence=False,
        )  # fmt: skip
