"""`bioptimus embed` and `predict`, end to end: real slides, real processes, plain h5py."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import torch

from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.work import list_work
from bioptimus.jobs import SlideOptions
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.planning import PlanOptions
from bioptimus.report_html.collect import collect
from bioptimus.runtime.builtin import weights_path
from bioptimus.runtime.lite0 import lite0_from_weights
from bioptimus.tiles import TileSpec, plan_tiles
from bioptimus.verify import verify
from cli.main import main
from tests.conftest import EXAMPLE_SLIDE
from tests.slides import write_pyramid
from tests.test_hdf5_contract import check_attributes, table
from tests.tiny_models import save_module

TILES_OF_EXAMPLE = 140


def bioptimus(
    *words: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
        timeout=110,
    )


def here(*words: str | Path) -> int:
    """As `bioptimus`, in this process: where no start is looked at, which takes seconds."""
    return main([*map(str, words)])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example slide's embeddings, made by the command line in a process of its own."""
    out = tmp_path_factory.mktemp("embedded")
    done = bioptimus("embed", EXAMPLE_SLIDE, "--out", out)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == out / "lite0" / "CMU-1-Small-Region.h5"
    return path


def test_a_batch_size_found_by_trying_changes_speed_alone(embedded: Path, tmp_path: Path) -> None:
    done = bioptimus(
        "embed", EXAMPLE_SLIDE, "--out", tmp_path, env={"BIOPTIMUS_EMBED_BATCH_SIZE": "auto"}
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("batch size "))
    found = int(line.split()[2])
    assert line.startswith(f"batch size {found} on cpu: ")
    (record,) = slide_records(tmp_path)
    assert record["batch_size"] == found
    with h5py.File(embedded) as fixed, h5py.File(done.stdout.strip()) as auto:
        np.testing.assert_array_equal(auto["coords"][:], fixed["coords"][:])
        # Other kernels for other batch lengths: the same to a part in a million, not to a bit.
        np.testing.assert_allclose(auto["features"][:], fixed["features"][:], rtol=0, atol=2e-5)
    again = bioptimus("embed", EXAMPLE_SLIDE, "--out", tmp_path, "--batch-size", "3")
    assert "done already" in again.stderr, "a result does not depend on the batch size"


def slide_records(out: Path) -> list[dict[str, Any]]:
    lines = [line for path in (out / "runs").iterdir() for line in path.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record["kind"] == "slide"]


def test_file_holds_what_its_contract_says(embedded: Path) -> None:
    with h5py.File(embedded) as file:
        features, coords = file["features"], file["coords"]
        count = len(coords)
        assert 40 <= count <= TILES_OF_EXAMPLE
        assert features.shape == (count, 424)
        assert features.dtype == np.float32
        assert coords.dtype == np.int64
        assert np.isfinite(features[:]).all()
        assert file["tissue_ratios"].shape == (count,)
        assert file["tissue_ratios"][:].min() >= 0.5
        assert file["thumbnail"].shape[2] == 3
        assert file["tissue_mask"].ndim == 2
        assert len(file["failed_tiles"]) == 0
        assert file.attrs["complete"]
        assert file.attrs["state"] == "ok"
        assert file.attrs["mpp_x"] == pytest.approx(0.499)
        assert "openslide" in file.attrs["mpp_source"]
        assert file.attrs["hardware"].startswith("cpu ")
        assert not file.attrs["compiled"]
        assert coords.attrs["patch_size"] == 224
        assert coords.attrs["patch_size_level0"] == 224
        assert coords.attrs["level0_magnification"] == pytest.approx(10 / 0.499)
        assert coords.attrs["target_magnification"] == pytest.approx(20)
        assert coords.attrs["overlap"] == 0
        assert coords.attrs["name"] == "CMU-1-Small-Region"
        assert (coords.attrs["level0_width"], coords.attrs["level0_height"]) == (2220, 2967)


def test_file_passes_verify_and_holds_only_what_the_docs_tell(embedded: Path) -> None:
    assert verify(embedded.parent, deep=True).findings == ()
    with h5py.File(embedded) as file:
        assert set(file) <= set(table("## Objects"))
        check_attributes(file.attrs, table("## Attributes of the root"))
        coords = {key: value for key, value in file["coords"].attrs.items() if key != "crc32"}
        check_attributes(coords, table("## Attributes of `coords`"))


def _reference_tiles(path: Path, coords: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """What a careful user would cut by hand: 224.449 px at 0.499 µm/px, scaled to 224."""
    side = 224 * 0.5 / 0.499
    tiles = []
    with openslide.OpenSlide(path) as slide:
        for x, y in coords:
            box = slide.read_region((int(x), int(y)), 0, (225, 225))
            background = np.full((225, 225, 3), 255.0)
            rgba = np.asarray(box, np.float64)
            alpha = rgba[..., 3:] / 255
            rgb = rgba[..., :3] * alpha + background * (1 - alpha)
            tiles.append(_area_average(rgb, side))
    return np.stack(tiles)


def _area_average(pixels: npt.NDArray[np.float64], side: float) -> npt.NDArray[np.uint8]:
    edges = np.linspace(0, side, 225)
    cells = np.arange(pixels.shape[0])
    weights = np.clip(
        np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells), 0, None
    ) / (side / 224)
    rows = np.tensordot(weights, pixels, axes=(1, 0))
    averages = np.tensordot(weights, rows, axes=(1, 1)).transpose(1, 0, 2)
    return np.asarray(np.rint(averages), np.uint8)


def test_rows_equal_a_straight_line_reference(embedded: Path) -> None:
    with h5py.File(embedded) as file:
        coords, features = file["coords"][:], file["features"][:]
    grid = plan_tiles((2220, 2967), spec=TileSpec(), mpp=(0.499, 0.499))
    lattice = {(tile.x, tile.y): tile.index for tile in grid}
    indices = [lattice[int(x), int(y)] for x, y in coords]
    assert indices == sorted(set(indices)), "coordinates are lattice points in row-major order"
    tiles = torch.from_numpy(_reference_tiles(EXAMPLE_SLIDE, coords))
    network = lite0_from_weights(torch.load(weights_path(), weights_only=True)).eval()
    with torch.inference_mode():
        _, expected = network(tiles)
    cosine = torch.nn.functional.cosine_similarity(torch.from_numpy(features), expected)
    assert float(cosine.min()) >= 0.9999


def test_predict_with_embeddings_writes_both_from_named_outputs(
    embedded: Path, tmp_path: Path
) -> None:
    done = bioptimus("predict", EXAMPLE_SLIDE, "--with-embeddings", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with h5py.File(done.stdout.strip()) as file, h5py.File(embedded) as embeddings:
        names = [name.decode() for name in file["output_names"][:]]
        assert "haematoxylin_od" in names
        assert file["predictions"].shape == (len(file["coords"]), len(names))
        np.testing.assert_array_equal(file["coords"][:], embeddings["coords"][:])
        np.testing.assert_allclose(
            file["features"][:], embeddings["features"][:], rtol=1e-4, atol=1e-4
        )


def test_eight_slides_in_four_threads_equal_each_made_alone(
    embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    for number in range(8):
        shutil.copy(EXAMPLE_SLIDE, folder / f"copy {number}.svs")
    assert here("embed", folder, "--out", tmp_path / "out", "--workers", "4") == 0
    written = sorted((tmp_path / "out" / "lite0").glob("*.h5"))
    assert len(written) == 8
    assert sorted(capsys.readouterr().out.splitlines()) == [str(path) for path in written]
    with h5py.File(embedded) as alone:
        for path in written:
            with h5py.File(path) as file:
                np.testing.assert_array_equal(file["coords"][:], alone["coords"][:])
                # Batches of other lengths may round the last bit differently.
                np.testing.assert_allclose(
                    file["features"][:], alone["features"][:], rtol=1e-4, atol=1e-4
                )


def test_second_run_skips_what_is_done_and_other_parameters_are_refused(
    embedded: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(embedded.parent.parent, out)
    again = bioptimus("embed", EXAMPLE_SLIDE, "--out", out)
    assert again.returncode == 0
    assert "skipped, done already" in again.stderr
    other = bioptimus("embed", EXAMPLE_SLIDE, "--out", out, "--overlap-px", "112")
    assert other.returncode == 1
    assert "overlap" in other.stderr
    assert "--overwrite" in other.stderr
    with h5py.File(out / "lite0" / "CMU-1-Small-Region.h5") as file:
        assert file["coords"].attrs["overlap"] == 0
    told = bioptimus("report", out, "--slides", "--html", tmp_path / "page.html")
    assert told.returncode == 1
    assert "failed: " in told.stdout
    assert "overlap" in told.stdout
    assert [row.state for row in collect(out).slides] == ["failed"]
    assert bioptimus("embed", EXAMPLE_SLIDE, "--out", out).returncode == 0
    assert "4 runs: 1 ok; 50 tiles" in bioptimus("report", out).stdout
    assert [row.state for row in collect(out).slides] == ["ok"]
    # What a run found done counts as what it is, also where nothing else tells of it.
    shutil.rmtree(out / "runs")
    assert bioptimus("embed", EXAMPLE_SLIDE, "--out", out).returncode == 0
    assert "1 run: 1 skipped; 50 tiles" in bioptimus("report", out).stdout
    assert [(row.state, row.tiles_done) for row in collect(out).slides] == [("ok", 50)]


def test_a_folder_that_holds_results_of_another_kind_is_told_before_the_run(
    embedded: Path, tmp_path: Path
) -> None:
    out = embedded.parent.parent
    other = tmp_path / "other.svs"
    shutil.copy(EXAMPLE_SLIDE, other)

    def notes(slide: Path, out: Path = out, **options: Any) -> tuple[str, ...]:
        plan = PlanOptions(tissue="none", **options)
        return list_work(
            RunConfig(inputs=(str(slide),), out=out, slide=SlideOptions(plan=plan))
        ).notes

    assert notes(other) == notes(other, min_tissue=0.1) == ()
    assert notes(other, overlap_px=112) == (
        f"{out}/lite0: holds results that were made otherwise, as CMU-1-Small-Region.h5 "
        "(overlap (px) is 0 there, 112 now); pass another --out to keep them apart",
    )
    # The run itself refuses this one, or replaces it where it is told to.
    assert notes(EXAMPLE_SLIDE, overlap_px=112) == ()
    assert notes(other, out=tmp_path / "new", overlap_px=112) == ()


BAD_INPUTS = {
    "broken/unreadable.svs": "unreadable.svs",
    "broken/unopenable.tiff": "compression",
    "broken/broken.svs": "not a",
    "aperio/jp2k-no-mpp.svs": "--mpp-override",
    "generic-tiff/boxes.tiff": "352.778",
}


def test_bad_slides_get_one_clear_line_each_and_the_others_finish(
    shared_slides: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.svs"
    empty.touch()
    text = tmp_path / "notes.txt.svs"
    text.write_text("not a slide")
    good = [EXAMPLE_SLIDE, shared_slides / "aperio" / "😐.svs"]
    done = bioptimus(
        "embed",
        *(shared_slides / name for name in BAD_INPUTS),
        empty,
        text,
        tmp_path / "missing.svs",
        shutil.copytree(shared_slides / "dicom" / "CMU-1-Small-Region", tmp_path / "series"),
        *good,
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    for name, fact in BAD_INPUTS.items():
        stem = Path(name).name
        told = [line for line in lines if stem in line and ": failed" in line]
        assert len({line.split("] ")[-1] for line in told}) >= 1, stem
        assert fact in " ".join(told), told
    for name, fact in (("empty.svs", "empty"), ("notes.txt.svs", ""), ("missing.svs", "no such")):
        told = [line for line in lines if name in line and "failed" in line]
        assert told, name
        assert fact in told[0], told
    assert len(done.stdout.splitlines()) == 3
    assert str(tmp_path / "out" / "lite0" / "series.h5") in done.stdout
    run = next((tmp_path / "out" / "runs").glob("*.json"))
    records = [json.loads(line) for line in run.read_text().splitlines()]
    states = [record["state"] for record in records if record["kind"] == "slide"]
    assert sorted(states).count("failed") == len(BAD_INPUTS) + 3
    assert len(states) == len(BAD_INPUTS) + 3 + 3


def test_slide_without_mpp_works_with_the_flag(shared_slides: Path, tmp_path: Path) -> None:
    done = bioptimus(
        "embed",
        shared_slides / "aperio" / "jp2k-no-mpp.svs",
        "--mpp-override",
        "0.5",
        "--out",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    with h5py.File(done.stdout.strip()) as file:
        assert file.attrs["mpp_source"].startswith("--mpp-override")
        assert len(file["coords"]) > 0


def test_slide_without_tissue_makes_a_file_without_rows(tmp_path: Path) -> None:
    blank = write_pyramid(tmp_path / "blank.tif", np.full((600, 600, 3), 240, np.uint8), mpp=0.5)
    done = bioptimus("embed", blank, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "empty" in done.stderr
    with h5py.File(done.stdout.strip()) as file:
        assert file.attrs["state"] == "empty"
        assert file.attrs["complete"]
        assert file["features"].shape == (0, 424)


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = bioptimus("embed", EXAMPLE_SLIDE, "--dry-run", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "mpp 0.499" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--overlap-px", "224"),
        ("--tile-size-px", "32"),
        ("--min-tissue", "1.5"),
        ("--model", "no-such-model"),
        ("--shard", "0/3"),
        ("--dtype", "int8"),
    ],
)
def test_wrong_usage_exits_2_with_one_line(words: tuple[str, str], tmp_path: Path) -> None:
    done = bioptimus("embed", EXAMPLE_SLIDE, *words, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_options_can_come_from_the_environment(tmp_path: Path) -> None:
    done = bioptimus(
        "embed",
        EXAMPLE_SLIDE,
        "--dry-run",
        env={"BIOPTIMUS_EMBED_OUT": str(tmp_path / "elsewhere")},
    )
    assert str(tmp_path / "elsewhere") in done.stdout


def test_tissue_model_takes_the_place_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ModelSpec(name="dark", tile=TileSpec(size_px=512, mpp=8.0), output_kind="mask")
    segmenter = save_module(DarkIsTissue(), spec, tmp_path / "dark.pt2")
    pixels = np.full((1024, 1024, 3), 240, np.uint8)
    pixels[:512, :512] = 40
    slide = write_pyramid(tmp_path / "slide.tif", pixels, mpp=0.5, factors=(1, 4))
    words = ("embed", slide, "--tissue", segmenter, "--out", tmp_path / "out")
    assert here(*words, "--tile-size-px", "224", "--min-tissue", "0.9") == 0
    with h5py.File(capsys.readouterr().out.strip()) as file:
        assert file["coords"][:].tolist() == [[0, 0], [224, 0], [0, 224], [224, 224]]
        assert file.attrs["tissue_method"] == "model"


class DarkIsTissue(torch.nn.Module):
    """uint8 (N, 512, 512, 3) → (N, 512, 512), 1 where it is dark."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return (tiles.float().mean(3) < 128).float()


GENES_IN, GENES_OUT = 19_374, 6_002
# The contract of m-optimus, with weights that hand the first genes on.
RNA = ModelSpec(
    name="rna",
    tile=TileSpec(size_px=64),
    output_kind="prediction_and_embedding",
    embedding_dim=3,
    prediction_dim=GENES_OUT,
    output_names=tuple(f"GENE{number}" for number in range(GENES_OUT)),
    omics_transform="log1p",
    rna_dim=GENES_IN,
    input_genes=tuple(f"ENSG{number:011}" for number in range(GENES_IN)),
)


class HandsGenesOn(torch.nn.Module):
    """(tiles, RNA) → (its first genes, the tile's mean colour)."""

    def forward(self, tiles: torch.Tensor, rna: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rna[:, :GENES_OUT] * 1.0, tiles.float().mean((1, 2))


def test_bulk_rna_reaches_the_model_in_its_gene_order_and_comes_back_as_tpm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_module(HandsGenesOn(), RNA, tmp_path / "rna.pt2")
    slide = write_pyramid(tmp_path / "slide.tif", np.zeros((128, 128, 3), np.uint8), mpp=0.5)
    table = tmp_path / "rna.csv"
    tpm = np.random.default_rng(0).random(GENES_IN)
    tpm *= 1e6 / tpm.sum()
    # Backwards, with version suffixes: the model's own order and names must come of it.
    rows = [f"{gene}.{number % 9 + 1},{tpm[number]}" for number, gene in enumerate(RNA.input_genes)]
    table.write_text("gene,tpm\n" + "\n".join(reversed(rows)) + "\n")
    listed = tmp_path / "list.csv"
    listed.write_text("slide,bulk_rna\nslide.tif,rna.csv\n")
    for number, words in enumerate([(slide, "--bulk-rna", table), (listed,)]):
        more = ("--with-embeddings", "--tissue", "none", "--out", tmp_path / f"out{number}")
        assert here("predict", *words, "--model", model, *more) == 0
        with h5py.File(capsys.readouterr().out.strip()) as file:
            assert tuple(name.decode() for name in file["output_names"][:]) == RNA.output_names
            assert tuple(name.decode() for name in file["input_gene_names"][:]) == RNA.input_genes
            np.testing.assert_allclose(
                file["predictions"][:], [tpm[:GENES_OUT]] * 4, rtol=1e-4, atol=1e-4
            )
            assert file["features"].shape == (4, 3)
    rest = [f"{row},{value}" for row, value in zip(rows, np.roll(tpm, 1), strict=True)]
    table.write_text("gene,tpm,other\n" + "\n".join(rest) + "\n")
    words = ("predict", slide, "--bulk-rna", table, "--model", model, "--tissue", "none")
    where = ("--out", tmp_path / "columns")
    assert here(*words, *where, "--value-column", "tpm") == 0
    capsys.readouterr()
    other = here(*words, *where, "--value-column", "other")
    assert other == 1, "a sample's result passed for another's"
    assert "bulk RNA" in capsys.readouterr().err
    table.write_text("gene,tpm\nENSG00000000000,minus one\nENSG00000000001,2\n")
    words = ("predict", slide, "--model", model, "--out", tmp_path / "out")
    assert here(*words, "--bulk-rna", table) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "rna.csv" in told
    assert "minus one" in told
    assert here(*words) == 2
    assert "--bulk-rna" in capsys.readouterr().err


def test_warnings_about_bulk_rna_are_in_the_file_and_in_the_report(tmp_path: Path) -> None:
    model = save_module(HandsGenesOn(), RNA, tmp_path / "rna.pt2")
    slide = write_pyramid(tmp_path / "slide.tif", np.zeros((64, 64, 3), np.uint8), mpp=0.5)
    table = tmp_path / "rna.csv"
    table.write_text(f"gene,tpm\n{RNA.input_genes[0]},1000000\n")
    config = RunConfig(
        inputs=(str(slide),),
        out=tmp_path / "out",
        model=str(model),
        bulk_rna=table,
        slide=SlideOptions(mode=InferenceMode.PREDICTION, plan=PlanOptions(tissue="none")),
    )
    (report,) = run(config).reports
    (warning,) = report.warnings
    assert f"{GENES_IN - 1} of {GENES_IN} genes" in warning
    with h5py.File(report.output) as file:
        assert list(file.attrs["warnings"]) == [warning]
