"""Every job script, for a node, for some and for many, before Slurm's own parser and scheduler."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.data.prepare.prepare import prepare_corpus

REPOSITORY = Path(__file__).parents[2]
SIZES = (1, 16, 512)


def check(cluster: dict[str, str], *arguments: object, script: str | None = None) -> None:
    """Let sbatch look at a script, given as text or by name."""
    done = subprocess.run(
        ["sbatch", "--test-only", *map(str, arguments)],
        env=cluster,
        cwd=REPOSITORY,
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " to start at " in done.stderr


@pytest.fixture(scope="session")
def many_documents(once: Any) -> Path:
    """A corpus that has a document for each of 512 lanes."""

    def make(folder: Path) -> None:
        texts = "".join(f'{{"text": "document {number}"}}\n' for number in range(600))
        (folder / "texts.jsonl").write_text(texts)
        (folder / "recipe.yaml").write_text("kind: bytes\n")
        prepare_corpus([folder / "texts.jsonl"], folder / "corpus", folder / "recipe.yaml")

    return once("many", make) / "corpus"


@pytest.fixture
def script(
    command: Any, checkout: Path, configure: Any, many_documents: Path
) -> Callable[..., str]:
    """`script(...)`: what `rlt-dist submit run.yaml ... --dry-run` prints, of 512 lanes."""
    configure(checkout.parent, "xl", "model.heads=8", "data.lanes=512")

    def rendered(*arguments: object) -> str:
        wish = [f"data.path={many_documents}", "mesh.tensor=8", "--gpus-per-node", "h200:8"]
        file = checkout.parent / "run.yaml"
        code, out, err = command("submit", file, *wish, *arguments, "--dry-run")
        assert code == 0, err
        return out

    return rendered


@pytest.mark.parametrize("nodes", SIZES)
def test_training(script: Any, wide_cluster: dict[str, str], nodes: int) -> None:
    check(wide_cluster, script=script("--nodes", nodes, "--time", "1-0", "--exclusive"))


@pytest.mark.parametrize("nodes", SIZES)
def test_training_on_half_as_many_too(
    script: Any, wide_cluster: dict[str, str], nodes: int
) -> None:
    wish = ("--nodes", nodes, "--nodes-min", (nodes + 1) // 2, "--mem=0", "--switches=1@1:00")
    check(wide_cluster, script=script(*wish))


@pytest.mark.parametrize("nodes", SIZES)
def test_the_tasks_of_a_study(script: Any, wide_cluster: dict[str, str], nodes: int) -> None:
    wish = ("run_folder=runs/seed-{task}", "train.seed={task}", "--array", "0-3%2")
    check(wide_cluster, script=script("--nodes", nodes, *wish))


@pytest.mark.parametrize("nodes", SIZES)
def test_preparation(wide_cluster: dict[str, str], nodes: int) -> None:
    wish = (f"--nodes={nodes}", "--ntasks-per-node=16", "slurm/prepare.sbatch")
    check(wide_cluster, *wish, "--input", "rlt_dist", "--output", "runs/x", "--tokenizer", "y")


@pytest.mark.parametrize("runs", SIZES)
def test_evaluation_of_as_many_runs(wide_cluster: dict[str, str], runs: int) -> None:
    wish = (f"--array=0-{runs - 1}", "--cpus-per-task=16", "--exclusive", "slurm/evaluate.sbatch")
    check(wide_cluster, *wish, "runs/seed-{task}", "--split", "test")


def test_the_parser_refuses_what_is_too_much(wide_cluster: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="not available"):
        check(wide_cluster, "--nodes=513", "slurm/prepare.sbatch", "x")
