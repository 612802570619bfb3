"""``bioptimus models``: which models there are, what is in a file, export, compile."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bioptimus.errors import UsageError
from cli.progress import say

app = typer.Typer(
    help="List models, look into files, export weights to .pt2, compile for this machine.",
    no_args_is_help=True,
)

TRUST = "Loading a .pt2 runs code from it: load only files you trust, and pin them with --sha256."


@app.command("list")
def list_models(
    as_json: Annotated[
        bool, typer.Option("--json", envvar="BIOPTIMUS_MODELS_LIST_JSON", help="Print JSON.")
    ] = False,
) -> None:
    """List the models known by name: those that run, and those whose weights can be exported."""
    from bioptimus.models.facts import FACTS
    from bioptimus.models.registry import SPECS

    if as_json:
        rows = {"registry": [spec.to_dict() for spec in SPECS.values()],
                "exportable": [facts.to_dict() for facts in FACTS.values()]}  # fmt: skip
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo("Models known by name (--model NAME; all but lite0 need --checkpoint FILE.pt2):")
    _table(
        ("name", "tile", "gives", "licence", "what it is"),
        [
            (
                spec.name,
                f"{spec.tile.size_px} px at {spec.tile.mpp:g} um/px",
                _gives(spec.embedding_dim, spec.prediction_dim, spec.output_kind),
                spec.licence,
                spec.description,
            )
            for spec in SPECS.values()
        ],
    )
    typer.echo("\nModels whose weights `bioptimus models export` knows (--as NAME):")
    _table(
        ("name", "tile", "gives", "licence", "architecture"),
        [
            (
                facts.key,
                f"{facts.tile_px} px at {facts.mpp:g} um/px",
                f"embedding {facts.dim}",
                facts.licence,
                facts.architecture,
            )
            for facts in FACTS.values()
        ],
    )


@app.command("show")
def show(
    model: Annotated[
        str, typer.Argument(metavar="NAME_OR_PT2", help="A model's name, or a .pt2 file.")
    ],
    sha256: Annotated[
        str | None, typer.Option(help="Fail unless the file has this SHA-256 digest.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="BIOPTIMUS_MODELS_SHOW_JSON", help="Print JSON.")
    ] = False,
) -> None:
    """Show everything known about a model or a .pt2 file. Nothing in the file is run."""
    found = _describe(model, sha256)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for key, value in _flat(found):
        say(f"{key:24} {value}")


@app.command("export")
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with config.json and model.safetensors or pytorch_model.bin; "
            "module:function that returns an nn.Module; or, with --from-hub, a model's name.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; NAME.pt2 if not given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--as",
            envvar="BIOPTIMUS_MODELS_EXPORT_AS",
            help="Which known model it is (`bioptimus models list`).",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name that the file will carry.")] = None,
    precision: Annotated[
        str,
        typer.Option(help="fp32; or bf16 or fp16, several times faster on a GPU."),
    ] = "fp32",
    device: Annotated[
        str, typer.Option(help="Where to trace: cpu (the file runs anywhere), or cuda.")
    ] = "cpu",
    verify: Annotated[
        Path | None,
        typer.Option(metavar="SLIDE", help="Compare on tiles of this slide too, not only random."),
    ] = None,
    tile_px: Annotated[
        int | None,
        typer.Option(
            help="Side of a tile in pixels; else the known model's, that of config.json, or 224."
        ),
    ] = None,
    mpp: Annotated[
        float | None,
        typer.Option(help="Scale of a tile in um per pixel; needed unless --as names the model."),
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Mean as R,G,B on the 0..1 scale.")] = None,
    std: Annotated[str | None, typer.Option(help="Deviation as R,G,B on the 0..1 scale.")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="cls, mean, cls_mean (of tokens), or none.")
    ] = None,
    prefix_tokens: Annotated[
        int | None, typer.Option(help="Class and register tokens before the first patch.")
    ] = None,
    gives: Annotated[
        str | None,
        typer.Option(
            help="embedding (not given: this), prediction, prediction_and_embedding, or mask: "
            "what the network returns, see below."
        ),
    ] = None,
    output_names: Annotated[
        Path | None,
        typer.Option(
            help="Text file: names of the predicted values in their order, one a line, no two "
            "the same."
        ),
    ] = None,
    input_genes: Annotated[
        Path | None, typer.Option(help="Text file: genes of the bulk RNA input, one a line.")
    ] = None,
    omics_transform: Annotated[
        str | None,
        typer.Option(
            help="log1p: RNA goes in as log1p(TPM), and the network gives log1p of what results "
            "hold."
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence that the file will state.")] = None,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Download the weights; SOURCE is a known name.")
    ] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="I have read the licence and accept it.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
) -> None:
    """Write a self-describing, portable .pt2 from weights that you have.

    The network takes normalised images (N, 3, H, W), and with --input-genes bulk RNA (N, G). It
    returns one tensor, an embedding (N, D) or, with --pooling, tokens (N, T, D); with --gives
    prediction (N, K), with mask (N, H, W); with prediction_and_embedding both, the prediction
    first. A tile's row must not depend on the other tiles of the batch.

    The file is compared with the network before it gets its name; a file that differs is not
    written. Nothing is downloaded without --from-hub and --accept-licence.
    """
    overrides = {
        "name": name,
        "tile_px": tile_px,
        "mpp": mpp,
        "mean": _triple("--mean", mean),
        "std": _triple("--std", std),
        "pooling": pooling,
        "prefix_tokens": prefix_tokens,
        "output_kind": gives,
        "omics_transform": omics_transform,
        "licence": licence,
        "precision": precision,
        **_names(output_names, input_genes),
    }
    from bioptimus.batch.places import refuse_unwritable_file
    from bioptimus.runtime.loader import prepare_environment

    if out is not None:
        refuse_unwritable_file(out, option="--out", example="my-model.pt2")
    prepare_environment()
    from bioptimus.runtime.sources import export_source

    report = export_source(
        source,
        out,
        facts_key=model,
        overrides={key: value for key, value in overrides.items() if value is not None},
        device=device,
        slide=verify,
        hub=from_hub,
        accept_licence=accept_licence,
        overwrite=overwrite,
        tell=lambda words: typer.echo(words, err=True),
    )
    spec = report.spec
    tile = f"{spec.tile.size_px} px at {spec.tile.mpp:g} um/px"
    made = _gives(spec.embedding_dim, spec.prediction_dim, spec.output_kind)
    typer.echo(f"takes tiles of              {tile}", err=True)
    typer.echo(f"gives                       {made}", err=True)
    real = "not compared (--verify SLIDE)"
    if report.worst_real is not None:
        real = f"{report.worst_real:.7f}"
    typer.echo(f"computes in                 {_arithmetic(spec.precision)}", err=True)
    typer.echo(f"compared to the network in  {report.compared_to}", err=True)
    typer.echo(f"worst cosine, random tiles  {report.worst_random:.7f}", err=True)
    typer.echo(f"worst cosine, real tiles    {real}", err=True)
    typer.echo(f"largest error of length     {100 * report.worst_length_error:.2g} %", err=True)
    if spec.output_kind == "mask":
        share = f"{100 * report.worst_differing_share:.2g} % of a tile's"
        typer.echo(f"pixels across a threshold   {share}", err=True)
    say(report.path)


@app.command("compile")
def compile_model(
    model: Annotated[str, typer.Argument(metavar="NAME_OR_PT2", help="A portable .pt2, or lite0.")],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto.")] = "cpu",
    isa: Annotated[
        str,
        typer.Option(help="native; or avx2, for a file that any AVX2 machine of a cluster runs."),
    ] = "native",
    sha256: Annotated[
        str | None, typer.Option(help="Fail unless the file has this SHA-256 digest.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Compile even if it was.")] = False,
) -> None:
    """Compile a portable .pt2 for this machine (faster by a quarter or so on a CPU).

    The result goes to the cache and is used from then on whenever that model runs here. Needs a
    C++ compiler, and for a GPU the CUDA toolkit; running does not.
    """
    if isa not in ("native", "avx2"):
        raise UsageError(f"--isa {isa}: known are native and avx2")
    from bioptimus.runtime.loader import prepare_environment, resolve_model, wanted_device

    prepare_environment()
    choice = resolve_model(model, sha256=sha256)
    from bioptimus.runtime.compilation import compile_portable

    path = compile_portable(
        choice.checkpoint,
        device=wanted_device(device),
        isa="avx2" if isa == "avx2" else "native",
        again=again,
        tell=partial(say, err=True),
    )
    say(path)


def _triple(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError as exc:
        raise UsageError(f"{option} {text}: must be three numbers, R,G,B") from exc
    if len(values) != 3:
        raise UsageError(f"{option} {text}: must be three numbers, R,G,B")
    return values


def _names(output_names: Path | None, input_genes: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, count, path in (
        ("output_names", "prediction_dim", output_names),
        ("input_genes", "rna_dim", input_genes),
    ):
        if path is None:
            continue
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"{path}: cannot be read: {exc}") from exc
        names = tuple(line.strip() for line in lines if line.strip())
        found |= {key: names, count: len(names)}
    return found


def _describe(model: str, sha256: str | None) -> dict[str, Any]:
    from bioptimus.models.registry import SPECS
    from bioptimus.models.types import Models
    from bioptimus.runtime.archive import file_sha256, inspect_archive
    from bioptimus.runtime.loader import check_pin

    if model == Models.LITE0:
        from bioptimus.runtime.builtin import builtin_checkpoint

        # Made now if need be: its digest is what results tell, and what --sha256 pins.
        return _describe(str(builtin_checkpoint().path), sha256)
    if model in SPECS:
        if sha256 is not None:
            raise UsageError(f"--sha256 pins a file; {model} is a name, give its .pt2")
        return {"known by name": True, "spec": SPECS[model].to_dict()}
    path = Path(os.path.expanduser(model))
    if not path.exists() and "/" not in model and not model.endswith(".pt2"):
        raise UsageError(f"{model}: no such model or file; known are {', '.join(SPECS)}")
    info = inspect_archive(path)
    check_pin(path, sha256)
    signature = info.signature
    return {
        "file": str(path),
        "sha256": file_sha256(path),
        "size_bytes": info.size_bytes,
        "kind": info.kind,
        "torch_version": info.torch_version or "not known",
        "device": info.device,
        **_compiled_facts(info),
        "inputs": [str(spec) for spec in signature.inputs] if signature else "not known",
        "outputs": [str(spec) for spec in signature.outputs] if signature else "not known",
        "batch": [signature.min_batch, signature.max_batch] if signature else "not known",
        "spec": info.spec.to_dict() if info.spec else "none: give --model NAME with --checkpoint",
    }


def _compiled_facts(info: Any) -> dict[str, str]:
    if info.kind != "compiled":
        return {}
    return {
        "system": info.system,
        "machine": info.machine,
        "cpu_features": info.isa,
        "compute_capability": info.compute_capability,
        "source_sha256": info.source_sha256,
    }


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            lines.append((prefix + key, _shortened(value)))
        else:
            lines.append((prefix + key, str(value)))
    return lines


def _shortened(values: Any) -> str:
    words = [str(value) for value in values]
    if len(words) > 12:
        return f"{', '.join(words[:6])}, ... ({len(words)} in all; --json shows them)"
    return ", ".join(words)


def _gives(embedding: int, prediction: int, kind: str) -> str:
    if kind == "mask":
        return "mask"
    parts = []
    if kind != "prediction":
        parts.append(f"embedding {embedding}")
    if prediction:
        parts.append(f"prediction {prediction}")
    return ", ".join(parts)


def _arithmetic(precision: str) -> str:
    if precision == "fp32":
        return "fp32 (for a GPU: --precision bf16 or fp16)"
    return precision


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  " + "  ".join(cells).rstrip())
