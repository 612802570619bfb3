"""A table of bulk RNA, brought into the order of a model's genes.

Values are TPM: transcripts per million, which sum to a million over all genes. The model's own
transform (``log1p``) is applied later; a table of logarithms is told from TPM by its sum.
"""

import csv
import gzip
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bioptimus.errors import UsageError
from bioptimus.models.types import ModelSpec

TPM_SUM = 1_000_000
# A table of protein-coding genes only still holds nine tenths of the transcripts.
TPM_SUM_TOLERANCE = 0.15

_GENE_HEADERS = (
    "gene", "gene_id", "geneid", "gene_name", "gene_symbol", "symbol", "hgnc_symbol", "ensembl",
    "ensembl_id", "ensembl_gene_id", "ensg", "id", "name", "target_id",
)  # fmt: skip
_VALUE_HEADERS = ("tpm", "tpm_unstranded", "value", "expression", "abundance")
_VERSION = re.compile(r"^(ENS[A-Z]*[GTP]\d{6,})\.\d+(_PAR_Y)?$", re.IGNORECASE)
_NOT_AVAILABLE = frozenset({"", "na", "n/a", "nan", "null", "none"})
# Rows that quantifiers write beside genes.
_SUMMARY_ROW = re.compile(r"^(N_|__)")


@dataclass(frozen=True, kw_only=True)
class BulkRNA:
    """Bulk RNA in a model's order.

    Attributes:
        values: (G,) float32 TPM, read-only; 0 for genes that the table lacks.
        missing: Genes of the model that the table lacks, in the model's order.
        unknown: Genes of the table that the model does not take, in the table's order.
        warnings: What a person should know; empty when all is well.
    """

    values: npt.NDArray[np.float32]
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_bulk_rna(
    path: Path,
    spec: ModelSpec,
    *,
    gene_column: str | None = None,
    value_column: str | None = None,
) -> BulkRNA:
    """Read a table of genes and TPM and bring it into the model's gene order.

    Versions of Ensembl identifiers (``ENSG00000141510.18``) are ignored; values of the same gene
    are added up, as TPM may be.

    Args:
        path: CSV or TSV, also gzipped (``.gz``), with or without a header line.
        spec: Names the model's genes, or only says how many there are; then the table must hold
            exactly that many, in the model's order.
        gene_column: Header of the column of genes; found by its usual names if not given, else
            the first.
        value_column: Header of the column of TPM; found by its usual names if not given, else
            the only column of numbers.

    Raises:
        UsageError: The model takes no RNA; or the table cannot be read, has no such column,
            holds something else than numbers from 0 up, or shares no gene with the model.
    """
    if not spec.rna_dim:
        raise UsageError(f"{spec.name}: takes no bulk RNA; leave out {path.name}")
    genes, values = _read_table(path, gene_column=gene_column, value_column=value_column)
    warnings = _check_sum(path, values)
    if not spec.input_genes:
        return _in_given_order(path, values, spec, warnings)
    return _align(path, genes, values, spec, warnings)


def without_version(gene: str) -> str:
    """``ENSG00000141510.18`` → ``ENSG00000141510``; other names unchanged."""
    found = _VERSION.match(gene)
    return found.group(1).upper() if found else gene


def _align(
    path: Path, genes: Sequence[str], values: Sequence[float], spec: ModelSpec, warnings: list[str]
) -> BulkRNA:
    places = {without_version(gene): place for place, gene in enumerate(spec.input_genes)}
    found = np.zeros(len(spec.input_genes), np.float64)
    count = np.zeros(len(spec.input_genes), np.int64)
    unknown = []
    for gene, value in zip(genes, values, strict=True):
        place = places.get(without_version(gene))
        if place is None:
            unknown.append(gene)
        else:
            found[place] += value
            count[place] += 1
    if not count.any():
        raise UsageError(
            f"{path.name}: none of its {len(genes)} genes (such as {genes[0]}) is one of the "
            f"{len(places)} that {spec.name} takes (such as {spec.input_genes[0]}); use the same "
            "kind of gene names"
        )
    missing = [gene for gene, seen in zip(spec.input_genes, count, strict=True) if not seen]
    if missing:
        warnings.append(
            f"{path.name}: {len(missing)} of {len(places)} genes that {spec.name} takes are not "
            f"in it (such as {missing[0]}) and count as 0"
        )
    if unknown:
        warnings.append(
            f"{path.name}: {len(unknown)} of its {len(genes)} genes are not taken by {spec.name} "
            f"(such as {unknown[0]})"
        )
    repeated = int((count > 1).sum())
    if repeated:
        warnings.append(f"{path.name}: {repeated} genes stand there more than once; added up")
    return BulkRNA(
        values=_frozen(found),
        missing=tuple(missing),
        unknown=tuple(unknown),
        warnings=tuple(warnings),
    )


def _in_given_order(
    path: Path, values: Sequence[float], spec: ModelSpec, warnings: list[str]
) -> BulkRNA:
    if len(values) != spec.rna_dim:
        raise UsageError(
            f"{path.name}: {len(values)} genes, {spec.name} takes {spec.rna_dim} and does not "
            "name them; give exactly those, in its order"
        )
    warnings.append(
        f"{path.name}: {spec.name} does not name its genes; the table's order is taken for theirs"
    )
    return BulkRNA(values=_frozen(values), warnings=tuple(warnings))


def _frozen(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    # An array that cannot change is transformed once for all tiles of a slide.
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


def _check_sum(path: Path, values: Sequence[float]) -> list[str]:
    total = math.fsum(values)
    if total <= 0:
        raise UsageError(f"{path.name}: all values are 0")
    if abs(total / TPM_SUM - 1) <= TPM_SUM_TOLERANCE:
        return []
    guess = "logarithms" if max(values) < 30 else "counts, FPKM, or a part of the genes"
    return [
        f"{path.name}: values sum to {total:,.0f}, TPM sum to {TPM_SUM:,}; are they {guess}?"
    ]  # fmt: skip


def _read_table(
    path: Path, *, gene_column: str | None, value_column: str | None
) -> tuple[list[str], list[float]]:
    rows = _rows(path)
    if not rows:
        raise UsageError(f"{path.name}: empty table")
    # A sample's name may be a number: then the name above the genes tells that it is a header.
    has_header = rows[0][1][0].strip().lower() in _GENE_HEADERS or not any(
        _is_number(cell) for cell in rows[0][1][1:]
    )
    names = [cell.strip() for cell in rows[0][1]] if has_header else []
    body = rows[1:] if has_header else rows
    if not body:
        raise UsageError(f"{path.name}: only a header line, no genes")
    gene_at = _column(path, names, gene_column, _GENE_HEADERS)
    if gene_at is None:
        gene_at = 0
    value_at = _column(path, names, value_column, _VALUE_HEADERS)
    if value_at is None:
        value_at = _only_numbers(path, names, body[0][1], gene_at)
    genes, values = [], []
    for line, cells in body:
        if max(gene_at, value_at) >= len(cells):
            raise UsageError(f"{path.name}: line {line} has {len(cells)} columns only")
        gene, text = cells[gene_at].strip(), cells[value_at].strip()
        if _SUMMARY_ROW.match(gene) or text.lower() in _NOT_AVAILABLE:
            continue
        if not gene:
            raise UsageError(f"{path.name}: line {line} names no gene")
        genes.append(gene)
        values.append(_tpm(path, line, text))
    if not genes:
        raise UsageError(f"{path.name}: no gene has a value")
    return genes, values


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """(line number, cells) of each line that is neither empty nor a comment."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read as a table: {exc}") from exc
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    if not lines:
        return []
    delimiter = max("\t,;", key=lines[0][1].count)
    cells = csv.reader((line for _, line in lines), delimiter=delimiter)
    try:
        return [(number, row) for (number, _), row in zip(lines, cells, strict=True)]
    except (csv.Error, ValueError) as exc:
        raise UsageError(f"{path.name}: cannot be read as a table: {exc}") from exc


def _column(
    path: Path, names: Sequence[str], wanted: str | None, usual: Sequence[str]
) -> int | None:
    if wanted is not None:
        if wanted not in names:
            there = ", ".join(names) if names else "none: it has no header line"
            raise UsageError(f"{path.name}: no column {wanted}; there are {there}")
        return names.index(wanted)
    lowered = [name.lower() for name in names]
    return next((lowered.index(name) for name in usual if name in lowered), None)


def _only_numbers(path: Path, names: Sequence[str], first: Sequence[str], gene_at: int) -> int:
    numeric = [at for at, cell in enumerate(first) if at != gene_at and _is_number(cell)]
    if len(numeric) == 1:
        return numeric[0]
    if not numeric:
        raise UsageError(f"{path.name}: has no column of numbers")
    found = ", ".join(names[at] if at < len(names) else f"column {at + 1}" for at in numeric)
    raise UsageError(f"{path.name}: several columns of numbers ({found}); say which holds the TPM")


def _tpm(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError as exc:
        raise UsageError(f"{path.name}: line {line}: {text!r} is not a number") from exc
    if not math.isfinite(value):
        raise UsageError(f"{path.name}: line {line}: {text} is not a finite number")
    if value < 0:
        raise UsageError(
            f"{path.name}: line {line}: {text} is negative; give TPM, not log values or z-scores"
        )
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
