"""Shards are complete, disjoint, the same for every job, and balanced by size."""

from pathlib import Path, PurePath
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bioptimus.batch.batch_system import job_id
from bioptimus.batch.inputs import SlideInput
from bioptimus.batch.shards import OVERHEAD_BYTES, Shard, parse_shard, share
from bioptimus.errors import UsageError


def slide(number: int, size_bytes: int) -> SlideInput:
    name = f"s{number:04}.svs"
    return SlideInput(path=Path("/d") / name, relative=PurePath(name), size_bytes=size_bytes)


@given(sizes=st.lists(st.integers(0, 10**10), max_size=60), count=st.integers(1, 9))
def test_every_slide_is_in_exactly_one_shard_whatever_the_order(
    sizes: list[int], count: int
) -> None:
    slides = [slide(n, size) for n, size in enumerate(sizes)]
    shuffled = slides.copy()
    Random(0).shuffle(shuffled)
    dealt = [share(slides, Shard(index=i, count=count)) for i in range(1, count + 1)]
    for i, part in enumerate(dealt, start=1):
        assert set(share(shuffled, Shard(index=i, count=count))) == set(part)
        assert list(part) == sorted(part, key=slides.index)
    assert sorted(s.relative for part in dealt for s in part) == [s.relative for s in slides]


def test_shards_are_balanced_by_size_and_not_by_number() -> None:
    random = Random(1)
    slides = [slide(n, int(random.lognormvariate(20, 1))) for n in range(400)]
    loads = [
        sum(s.size() + OVERHEAD_BYTES for s in share(slides, Shard(index=i, count=8)))
        for i in range(1, 9)
    ]
    assert max(loads) < 1.02 * min(loads)


def test_slides_without_size_are_balanced_by_number() -> None:
    slides = [slide(n, 0) for n in range(40)]
    parts = [share(slides, Shard(index=i, count=8)) for i in range(1, 9)]
    assert {len(part) for part in parts} == {5}


def test_more_jobs_than_slides_leaves_empty_shards() -> None:
    parts = [share([slide(0, 1)], Shard(index=i, count=3)) for i in (1, 2, 3)]
    assert sorted(map(len, parts)) == [0, 0, 1]


def test_size_is_looked_up_where_the_list_does_not_give_it(tmp_path: Path) -> None:
    for name, size in (("a.svs", 50 << 20), ("b.svs", 20 << 20), ("c.svs", 20 << 20)):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(size)
    names = ("a.svs", "b.svs", "c.svs", "missing.svs")
    slides = [SlideInput(path=tmp_path / n, relative=PurePath(n)) for n in names]
    assert [s.path.name for s in share(slides, Shard(index=1, count=2))] == ["a.svs"]


@pytest.mark.parametrize(
    "text", ["", "3", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2", "1,4", "1.0/4", "autoo", "½/2"]
)
def test_bad_shard_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text, {})


@pytest.mark.parametrize("text", ["2/4", " 2 / 4 "])
def test_shard_counts_from_1(text: str) -> None:
    assert parse_shard(text, {}) == Shard(index=2, count=4)


SLURM = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}
GRID_ENGINE = {
    "SGE_TASK_ID": "3",
    "SGE_TASK_FIRST": "1",
    "SGE_TASK_LAST": "4",
    "SGE_TASK_STEPSIZE": "1",
}
LSF = {"LSB_JOBINDEX": "3", "LSB_JOBINDEX_END": "4", "LSB_JOBINDEX_STEP": "1"}


@pytest.mark.parametrize("environment", [SLURM, GRID_ENGINE, LSF])
def test_auto_reads_the_array_variables(environment: dict[str, str]) -> None:
    assert parse_shard("auto", environment) == Shard(index=3, count=4)


def test_array_from_0_is_counted_from_1() -> None:
    environment = SLURM | {
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "3",
        "SLURM_ARRAY_TASK_STEP": "1",
    }
    assert parse_shard("AUTO", environment) == Shard(index=1, count=4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no array job"),
        ({"SGE_TASK_ID": "undefined", "LSB_JOBINDEX": "0"}, "no array job"),
        ({"PBS_ARRAY_INDEX": "3"}, r"pass i/n, such as --shard \$PBS_ARRAY_INDEX/8"),
        (SLURM | {"SLURM_ARRAY_TASK_ID": "x"}, "no number"),
        # --array=3,7,8: only some tasks of an array were submitted again
        (
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "3",
                "SLURM_ARRAY_TASK_COUNT": "3",
            },
            "submit the whole array again",
        ),
        (SLURM | {"SLURM_ARRAY_TASK_ID": "4"}, "submit the whole array again"),
        # --array=2,4, of which the first seems to be the first of two
        (
            {
                "SLURM_ARRAY_TASK_ID": "2",
                "SLURM_ARRAY_TASK_MIN": "2",
                "SLURM_ARRAY_TASK_MAX": "4",
                "SLURM_ARRAY_TASK_STEP": "1",
                "SLURM_ARRAY_TASK_COUNT": "2",
            },
            "do not follow each other from 2 on; submit the whole array again",
        ),
    ],
)
def test_auto_says_why_it_cannot_tell(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_shard("auto", environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "9"}, "9"),
        (SLURM | {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "8"}, "8_5"),
        ({"PBS_JOBID": "7.server"}, "7.server"),
    ],
)
def test_job_id_is_the_one_its_user_knows(
    environment: dict[str, str], expected: str | None
) -> None:
    assert job_id(environment) == expected
