"""examples/chainermn: the two examples that no other test runs, and what their headers and the page list as changed."""

import ast

import numpy as np
import pytest
from PIL import Image

from tests._worlds import run_job
from tests.docs.pages import page
from tests.examples.running import EXAMPLES, epochs

FOLDER = EXAMPLES / "chainermn"
HEADING = "What changed from ChainerMN's example, besides Chainer's words for PyTorch's:\n"
NAMES = (
    *("train_mnist", "train_mnist_model_parallel", "train_mnist_dual_parallel", "train_cifar", "train_dcgan"),
    *("train_imagenet", "parallel_convolution", "seq2seq", "seq2seq_model_parallel"),
)


def changes(name: str) -> str:
    """The list of changes at the top of an example."""
    documentation = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    return documentation.partition(HEADING)[2].strip()


def test_the_nine_examples_are_here_and_nowhere_else():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES)
    assert not {path.stem for path in EXAMPLES.glob("*.py")} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_what_changed_in_an_example(name):
    assert changes(name).startswith("- ")
    assert f"`examples/chainermn/{name}.py`:\n\n{changes(name)}\n" in page("from-chainermn.md")


def test_a_translator_on_two_ranks_learns(tmp_path):
    options = "--bleu -u 32 --layer 1 -s 2e -l 0.01 -o"
    job = run_job(FOLDER / "seq2seq.py", 2, args=[*options.split(), str(tmp_path)], timeout=150)
    assert job.returncode == 0, job.output
    assert job.stdout.index("rank 0: cpu, 1500 sentences") < job.stdout.index("rank 1: cpu, 1500 sentences")
    log = epochs(tmp_path)
    assert log["loss"][1] < 0.5 * log["loss"][0]
    assert log["bleu"][1] > 0.5


def write_images(folder) -> None:
    """Bright and dark images, and lists of them."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        lines = []
        for number in range(count):
            pixels = draw.integers(0, 100, (230, 240, 3)) + 150 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{part}{number}.png")
            lines.append(f"{part}{number}.png {number % 2}\n")
        (folder / f"{part}.txt").write_text("".join(lines))


def test_a_convnet_on_two_ranks_reads_a_list_of_images_and_is_resumed(tmp_path):
    write_images(tmp_path)
    arguments = [
        str(tmp_path / "train.txt"),
        str(tmp_path / "val.txt"),
        "-R",
        str(tmp_path),
        "-o",
        str(tmp_path / "out"),
    ]
    options = ["-a", "resnet50", "-B", "3", "-b", "4", "--test"]
    job = run_job(FOLDER / "train_imagenet.py", 2, args=[*arguments, *options, "-E", "1"], timeout=150)
    assert job.returncode == 0, job.output
    job = run_job(FOLDER / "train_imagenet.py", 2, args=[*arguments, *options, "-E", "2", "-r"], timeout=150)
    assert job.returncode == 0, job.output
    assert job.survivors == ()
    log = epochs(tmp_path / "out")
    assert log["step"][-1] == 2
