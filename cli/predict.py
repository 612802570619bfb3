"""``bioptimus predict``: slides to predictions.

The signature declares the options; their values reach the library by name, as
``context.params``.
"""

from pathlib import Path
from typing import Annotated

import typer

from cli import options as opt


def predict(
    context: typer.Context,
    inputs: opt.Inputs,
    out: Annotated[
        Path, typer.Option(help="Folder for results: <out>/<model>/<folders>/<slide>.h5.")
    ] = Path("predictions"),
    with_embeddings: Annotated[
        bool,
        typer.Option("--with-embeddings", help="Write embeddings too, from the same forward pass."),
    ] = False,
    bulk_rna: Annotated[
        Path | None,
        typer.Option(
            help="Table of bulk RNA (TPM) for models that read it; a bulk_rna column of a CSV "
            "list names one per slide.",
            show_default=False,
        ),
    ] = None,
    gene_column: Annotated[
        str | None, typer.Option(help="Its column of gene names.", show_default=False)
    ] = None,
    value_column: Annotated[
        str | None, typer.Option(help="Its column of TPM values.", show_default=False)
    ] = None,
    model: opt.Model = "lite0",
    checkpoint: opt.Checkpoint = None,
    sha256: opt.Sha256 = None,
    device: opt.Device = "auto",
    batch_size: opt.BatchSize = None,
    max_wait_ms: opt.MaxWaitMs = 30.0,
    tile_size_px: opt.TileSizePx = None,
    tile_mpp: opt.TileMpp = None,
    overlap_px: opt.OverlapPx = 0,
    min_tissue: opt.MinTissue = 0.5,
    tissue: opt.Tissue = "auto",
    tissue_class: opt.TissueClass = None,
    search_in_mask: opt.SearchInMask = False,
    keep_pen: opt.KeepPen = False,
    mpp_override: opt.MppOverride = None,
    mpp_fallback: opt.MppFallback = None,
    reader: opt.ReaderChoice = opt.Reader.AUTO,
    icc: opt.IccChoice = opt.Icc.NONE,
    allow_upsample: opt.AllowUpsample = False,
    dtype: opt.DtypeChoice = opt.Dtype.FLOAT32,
    max_failed_tiles: opt.MaxFailedTiles = 0.01,
    overwrite: opt.Overwrite = False,
    fail_fast: opt.FailFast = False,
    dry_run: opt.DryRun = False,
    log_json: opt.LogJson = False,
    workers: opt.Workers = None,
    readers: opt.Readers = None,
    threads: opt.Threads = None,
    shard: opt.Shard = None,
    stage: opt.Stage = None,
    stage_gb: opt.StageGb = 100.0,
) -> int:
    """Turn slides into predictions (genes, scores, measures), one HDF5 file each.

    With --with-embeddings, the embeddings of the same forward pass are written too. A rerun
    goes on where the last one ended. Exit code: 0 all done, 1 a slide failed, 2 wrong usage,
    130 / 143 / 129 stopped by a signal (what was computed is kept).
    """
    from bioptimus.models.types import InferenceMode
    from cli.run_slides import run_slides

    mode = InferenceMode.PREDICTION_WITH_EMBEDDING if with_embeddings else InferenceMode.PREDICTION
    return run_slides(context.params, mode=mode)
