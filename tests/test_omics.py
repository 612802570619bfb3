"""A table of bulk RNA reaches the model's genes, or the error says what is wrong with it."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from bioptimus.errors import UsageError
from bioptimus.models.types import ModelSpec
from bioptimus.omics import read_bulk_rna

GENES = ("ENSG00000141510", "ENSG00000139618", "ENSG00000012048")
SPEC = ModelSpec(name="genes", rna_dim=3, input_genes=GENES)
UNNAMED = ModelSpec(name="unnamed", rna_dim=3)
GOOD = [600_000.0, 300_000.0, 100_000.0]


def write(folder: Path, text: str, name: str = "rna.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "gene_id,TPM\n{0},600000\n{1},300000\n{2},100000\n"),
        ("a.csv", "gene,4711\n{0},6e5\n{1},3e5\n{2},1e5\n"),
        ("a.csv", "{0},600000\n{1},300000\n{2},100000\n"),
        ("a.csv", "{2},1e5\n{0},6e5\n{1},3e5\n"),
        ("a.tsv", "Symbol\tensembl_id\tcounts\ttpm\nTP53\t{0}\t9\t6e5\nX\t{1}\t9\t3e5\n"
                  "Y\t{2}\t9\t1e5\n"),
        ("a.csv", '\ufeff"gene";"value"\r\n"{0}";"600000"\r\n"{1}";300000\r\n"{2}";100000\r\n'),
        ("a.csv", "# made by us\ngene,tpm\n\n{0}.18,600000\n{1}.1,300000\n{2}.24,100000\n"),
        ("a.tsv", "gene_id\ttpm_unstranded\nN_unmapped\t\n{0}\t6e5\n{1}\t3e5\n{2}\t1e5\n"),
    ],
    ids=["header", "sample number", "no header", "other order", "more columns",
         "semicolons, BOM, CRLF", "versions", "summary rows"],
)  # fmt: skip
def test_tables_of_many_forms_come_out_in_the_models_order(
    tmp_path: Path, name: str, text: str
) -> None:
    spec = SPEC
    if "Symbol" in text:  # the first usual name wins: symbols are none of this model's genes
        spec = SPEC.with_(input_genes=("TP53", "X", "Y"))
    found = read_bulk_rna(write(tmp_path, text.format(*GENES), name), spec)
    assert found.values.tolist() == GOOD
    assert found.values.dtype == np.float32
    assert (found.missing, found.unknown, found.warnings) == ((), (), ())


def test_columns_by_option(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "symbol,ens,fpkm,mine\nA,{},1,6e5\nB,{},2,3e5\nC,{},3,1e5\n".format(*GENES),
    )
    found = read_bulk_rna(path, SPEC, gene_column="ens", value_column="mine")
    assert found.values.tolist() == GOOD
    with pytest.raises(UsageError, match="no column nope; there are symbol, ens, fpkm, mine"):
        read_bulk_rna(path, SPEC, value_column="nope")
    with pytest.raises(UsageError, match=r"several columns of numbers \(fpkm, mine\)"):
        read_bulk_rna(path, SPEC, gene_column="ens")


def test_a_gzipped_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rna.tsv.gz"
    path.write_bytes(gzip.compress("{}\t6e5\n{}\t3e5\n{}\t1e5\n".format(*GENES).encode()))
    assert read_bulk_rna(path, SPEC).values.tolist() == GOOD


def test_missing_and_unknown_genes_are_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path, f"gene,tpm\n{GENES[0]},600000\nENSG00000999999,400000\n")
    found = read_bulk_rna(path, SPEC)
    assert found.values.tolist() == [600_000, 0, 0]
    assert found.missing == GENES[1:]
    assert found.unknown == ("ENSG00000999999",)
    assert "2 of 3 genes that genes takes are not in it" in found.warnings[0]
    assert "1 of its 2 genes are not taken" in found.warnings[1]


def test_values_of_one_gene_are_added_up(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "gene,tpm\n{0}.1,500000\n{0}.1_PAR_Y,100000\n{1},300000\n{2},100000\n".format(*GENES),
    )
    found = read_bulk_rna(path, SPEC)
    assert found.values.tolist() == GOOD
    assert found.warnings == ("rna.csv: 1 genes stand there more than once; added up",)


def test_a_gene_without_a_value_counts_as_missing(tmp_path: Path) -> None:
    path = write(tmp_path, "gene,tpm\n{},900000\n{},NA\n{},1e5\n".format(*GENES))
    assert read_bulk_rna(path, SPEC).missing == (GENES[1],)


@pytest.mark.parametrize(
    ("scale", "guess"), [(1e-5, "logarithms"), (30, "counts"), (0.5, "a part of the genes")]
)
def test_values_that_do_not_sum_to_a_million_are_questioned(
    tmp_path: Path, scale: float, guess: str
) -> None:
    lines = [f"{gene},{value * scale}" for gene, value in zip(GENES, GOOD, strict=True)]
    (warning,) = read_bulk_rna(write(tmp_path, "\n".join(lines)), SPEC).warnings
    assert guess in warning


@pytest.mark.parametrize(("share", "count"), [(0.86, 0), (1.14, 0), (0.84, 1), (1.16, 1)])
def test_the_sum_may_differ_a_little(tmp_path: Path, share: float, count: int) -> None:
    lines = [f"{gene},{value * share}" for gene, value in zip(GENES, GOOD, strict=True)]
    assert len(read_bulk_rna(write(tmp_path, "\n".join(lines)), SPEC).warnings) == count


def test_a_model_that_does_not_name_its_genes_takes_them_in_order(tmp_path: Path) -> None:
    found = read_bulk_rna(write(tmp_path, "A,6e5\nB,3e5\nC,1e5\n"), UNNAMED)
    assert found.values.tolist() == GOOD
    assert "does not name its genes" in found.warnings[0]
    with pytest.raises(UsageError, match="2 genes, unnamed takes 3"):
        read_bulk_rna(write(tmp_path, "A,6e5\nB,4e5\n"), UNNAMED)


def test_values_cannot_be_changed(tmp_path: Path) -> None:
    found = read_bulk_rna(write(tmp_path, "A,6e5\nB,3e5\nC,1e5\n"), UNNAMED)
    with pytest.raises(ValueError, match="read-only"):
        found.values[0] = 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty table"),
        ("gene,tpm\n", "only a header line"),
        ("gene,tpm\nA,1\n", "none of its 1 genes"),
        (f"gene,tpm\n{GENES[0]},-3\n", "line 2: -3 is negative; give TPM"),
        (f"gene,tpm\n{GENES[0]},x\n", "line 2: 'x' is not a number"),
        (f"gene,tpm\n{GENES[0]},inf\n", "line 2: inf is not a finite number"),
        (f"gene,tpm\n{GENES[0]},1\n{GENES[1]}\n", "line 3 has 1 columns only"),
        (f"gene,tpm\n{GENES[0]},0\n", "all values are 0"),
        ("gene,tpm\n,5\n", "line 2 names no gene"),
        ("gene,name\nA,B\n", "no column of numbers"),
        ("gene,tpm\nA,NA\n", "no gene has a value"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"rna.csv: .*{words}"):
        read_bulk_rna(write(tmp_path, text), SPEC)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "a.csv.gz").write_text("not gzip")
    for name in ("a.csv", "a.csv.gz", "missing.csv", "."):
        with pytest.raises(UsageError, match="cannot be read"):
            read_bulk_rna(tmp_path / name, SPEC)


def test_a_model_without_rna_refuses_a_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no bulk RNA"):
        read_bulk_rna(write(tmp_path, "A,1\n"), ModelSpec(name="h0"))


def test_twenty_thousand_genes(tmp_path: Path) -> None:
    genes = [f"ENSG{number:011d}" for number in range(20_000)]
    rows = [f"{gene}.{number % 9},50" for number, gene in enumerate(reversed(genes))]
    found = read_bulk_rna(
        write(tmp_path, "gene,tpm\n" + "\n".join(rows)),
        SPEC.with_(rna_dim=20_000, input_genes=tuple(genes)),
    )
    assert found.warnings == ()
    assert set(found.values.tolist()) == {50.0}
