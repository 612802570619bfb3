"""`bioptimus models` shows what there is and what is in a file, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bioptimus.models.facts import FACTS
from bioptimus.models.registry import SPECS
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.builtin import builtin_checkpoint
from cli.main import main
from tests.tiny_models import TINY, save_foreign, save_tiny

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("cli") / "tiny.pt2")


def test_list_names_every_model(capsys: Captured) -> None:
    assert main(["models", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = {line[0] for line in lines if line}
    assert names >= SPECS.keys() | FACTS.keys()
    assert main(["models", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["registry"]] == list(SPECS)
    assert [row["key"] for row in found["exportable"]] == list(FACTS)


def test_show_prints_the_whole_description_and_the_digest(portable: Path, capsys: Captured) -> None:
    assert main(["models", "show", str(portable)]) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines()
                 if len(line.split(None, 1)) == 2)  # fmt: skip
    assert shown["sha256"] == file_sha256(portable)
    assert shown["kind"] == "portable"
    assert shown["inputs"] == "uint8 (N, 8, 8, 3)"
    assert shown["spec.licence"] == "CC0-1.0"
    assert main(["models", "show", str(portable), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spec"] == json.loads(json.dumps(TINY.to_dict()))
    assert found["batch"] == [1, 1024]


def test_show_knows_names_and_foreign_files(tmp_path: Path, capsys: Captured) -> None:
    assert main(["models", "show", "h1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["name"] == "h1"
    path = save_foreign(tmp_path / "foreign.pt2")
    assert main(["models", "show", str(path)]) == 0
    assert "none: give --model NAME" in capsys.readouterr().out


def test_show_tells_the_digest_of_the_built_in_model_that_results_tell(capsys: Captured) -> None:
    digest = file_sha256(builtin_checkpoint().path)
    assert main(["models", "show", "lite0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sha256"] == digest
    assert found["spec"]["name"] == "lite0"
    assert main(["models", "show", "lite0", "--sha256", digest]) == 0
    assert main(["models", "show", "lite0", "--sha256", "0" * 64]) == 1


def test_show_keeps_to_a_pinned_digest(portable: Path, capsys: Captured) -> None:
    assert main(["models", "show", str(portable), "--sha256", file_sha256(portable)]) == 0
    assert main(["models", "show", str(portable), "--sha256", "0" * 64]) == 1
    assert "do not trust it" in capsys.readouterr().err
    assert main(["models", "show", "h1", "--sha256", "0" * 64]) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["models", "show", "nonsense"], 2, "no such model or file"),
        (["models", "show", "nonsense.pt2"], 2, "no such file"),
        (["models", "compile", "h1"], 2, "pass --checkpoint"),
        (["models", "compile", "lite0", "--isa", "mmx"], 2, "--isa mmx"),
        (["models", "export", ".", "--mean", "1,2"], 2, "--mean 1,2: must be three numbers"),
        (["models", "export", ".", "--precision", "fp8"], 2, "precision 'fp8': known are fp32"),
        (
            ["models", "export", ".", "--omics-transform", "sqrt"],
            2,
            "'sqrt': known are log1p",
        ),
        (["models", "export", ".", "--as", "nonsense"], 2, "nonsense: no facts"),
        (["models", "export", "m:lite0"], 2, "lite0: the built-in model is called so; pass anoth"),
        # Before weights are read, or downloaded.
        (["models", "export", ".", "--out", "/"], 2, "--out /: is a folder; name a file"),
        (["models", "export", ".", "-o", "/dev/null/x"], 2, "--out /dev/null: /dev/null is a file"),
        (["models", "export", ".", "--input-genes", "no-file"], 2, "no-file: cannot be read"),
    ],
)
def test_mistakes_are_one_line_with_the_right_exit_code(
    words: list[str], code: int, said: str, capsys: Captured
) -> None:
    assert main(words) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_list_and_show_load_neither_torch_nor_numpy(portable: Path) -> None:
    code = (
        "import sys; from cli.main import main\n"
        "main(['models', 'list']); main(['models', 'show', sys.argv[1]])\n"
        "print([m for m in ('torch', 'numpy', 'h5py') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(portable)], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
