"""Logger prints and writes once, on rank 0."""

import io
import json
import math
import re

import numpy as np
import pytest
import torch
from rich.console import Console

import torchmn
from tests._worlds import ranks
from torchmn.errors import ArgumentError
from torchmn.training import Logger


def plain_console(width: int = 40) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=width), text


def test_the_table_has_one_header_and_aligned_rows():
    console, text = plain_console(60)
    with Logger(console=console, formats={"accuracy": ".1%", "loss": ".8f"}, file_only=["rate"]) as log:
        log.epoch(epoch=1, loss=torch.tensor(2.5), accuracy=np.float64(0.25), a_column_with_a_long_name=3, rate=1)
        log.epoch(epoch=10, loss=12.5, accuracy=1.0, a_column_with_a_long_name=4)
        log.epoch(epoch=10, loss=None, accuracy="-", a_column_with_a_long_name=5, rate=2)
        log.print("[not markup]")
        log.epoch(epoch=11, other=1e-7)
    assert text.getvalue().splitlines() == [
        "   epoch        loss  accuracy  a_column_with_a_long_name",
        "       1  2.50000000     25.0%                          3",
        "      10  12.50000000    100.0%                          4",
        "      10        None         -                          5",
        "[not markup]",
        "",
        "   epoch     other",
        "      11     1e-07",
    ]


def table(width: int, *names: str) -> list[str]:
    console, text = plain_console(width)
    with Logger(console=console) as log:
        log.epoch(**{name: number + 0.5 if number else 1 for number, name in enumerate(names)})
    return text.getvalue().splitlines()


def test_in_a_narrow_terminal_the_words_of_a_name_stand_below_each_other():
    names = ("epoch", "test loss", "test accuracy", "samples/s")
    assert table(45, *names) == [
        "   epoch  test loss  test accuracy  samples/s",
        "       1        1.5            2.5        3.5",
    ]
    assert table(44, *names) == [
        "          test      test",
        "epoch     loss  accuracy  samples/s",
        "    1      1.5       2.5        3.5",
    ]


def test_a_row_that_is_still_too_wide_takes_several_lines_and_no_word_is_broken():
    assert table(30, "epoch", "test loss", "test accuracy", "samples/s", "a_name_longer_than_a_whole_line") == [
        "          test      test",
        "epoch     loss  accuracy",
        "    samples/s",
        "    a_name_longer_than_a_whole_line",
        "    1      1.5       2.5",
        "          3.5",
        "                                4.5",
    ]


def test_the_file_has_a_json_object_per_line_also_for_numbers_that_json_lacks(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    console, _ = plain_console()
    with Logger(console=console, json=path, json_steps=2) as log:
        for step in range(5):
            log.step(loss=torch.tensor(float(step)))
        log.epoch(epoch=1, loss=float("nan"), per_class=torch.tensor([1.0, math.inf]), note=None, when=console)
        lines = path.read_text().splitlines()  # whole before the file is closed
    values = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert values[:2] == [{"step": 2, "loss": 1.0}, {"step": 4, "loss": 3.0}]
    assert values[2].pop("elapsed") >= 0 and isinstance(values[2].pop("when"), str)
    assert values[2] == {"step": 5, "epoch": 1, "loss": "nan", "per_class": [1.0, "inf"], "note": None}
    with Logger(console=console, json=path, append=True) as log:
        log.epoch(epoch=2)
    assert len(path.read_text().splitlines()) == 4
    with Logger(console=console, json=path) as log:
        log.epoch(epoch=3)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [3]


@ranks(3, on="threads")
def test_only_rank_0_prints_and_writes(comm):
    console, text = plain_console()
    folder = comm.bcast_obj(None if comm.rank else __import__("tempfile").mkdtemp())
    path = f"{folder}/{comm.rank}.jsonl"
    with Logger(comm, 2, json=path, console=console) as log:
        log.step(loss=1.0)
        log.epoch(epoch=1)
        log.print("hello")
    comm.barrier()
    if comm.rank == 0:
        assert "hello" in text.getvalue() and "epoch" in text.getvalue()
        with open(path) as file:
            assert len(file.readlines()) == 1
    else:
        assert text.getvalue() == ""
        with pytest.raises(FileNotFoundError):
            open(path)  # noqa: SIM115


@pytest.mark.parametrize("place", ["a_file/log.jsonl", "a_file/deeper/log.jsonl", "a_folder"])
def test_a_file_that_cannot_be_written_raises_before_the_training(place, tmp_path):
    (tmp_path / "a_file").write_text("not a directory")
    (tmp_path / "a_folder").mkdir()
    wrong = re.escape(repr(str(tmp_path / place)))
    with pytest.raises(ArgumentError, match=rf"^Logger: expected json to name a file .*got {wrong} \(.*or omit json"):
        Logger(json=tmp_path / place)

    def training(comm):
        with Logger(comm, json=tmp_path / place) as log:
            comm.barrier()
            log.step()

    with pytest.raises(ArgumentError, match=rf"^rank 0 of 3: Logger: .*got {wrong}"):
        torchmn.run_threads(training, 3, timeout=30)


def test_rank_0_may_make_a_logger_alone(tmp_path):
    def training(comm):
        if comm.rank == 0:
            with Logger(comm, json=tmp_path / "log.jsonl", console=plain_console()[0]) as log:
                log.epoch(loss=1.0)

    torchmn.run_threads(training, 2, timeout=30)
    assert json.loads((tmp_path / "log.jsonl").read_text())["loss"] == 1.0


def test_without_a_terminal_there_is_no_bar_but_a_line_now_and_then():
    console, text = plain_console()
    with Logger(None, 3, console=console, line_seconds=0.0) as log:
        for step in range(3):
            log.step(loss=step / 8)
    lines = text.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in text.getvalue()
    assert lines[1].startswith("step 2 of 3  ") and lines[1].endswith("steps/s  loss 0.125")
    console, text = plain_console()
    with Logger(None, 3, console=console, line_seconds=1e9) as log:
        log.step(loss=1.0)
    assert text.getvalue() == ""


def test_on_a_terminal_a_bar_shows_the_step_and_its_values_and_leaves_only_the_table():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, legacy_windows=False)
    log = Logger(None, 4, console=console)
    with log:
        log.step(loss=0.5)
        log.step(loss=0.25)
        assert log._bar is not None
        log._bar.refresh()
        assert "2/4" in text.getvalue() and "loss 0.25" in text.getvalue()
        log.epoch(epoch=1, loss=0.25)
    _, _, after_the_bar = text.getvalue().rpartition("\x1b[?25h")  # shows the cursor again
    assert "\x1b[?25l" not in after_the_bar and "\x1b[2K" in after_the_bar, "the line of the bar is erased"
    log.close()


@pytest.mark.parametrize("width", [40, 80])
def test_the_bar_fits_the_terminal(width):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, legacy_windows=False)
    with Logger(None, 400000, console=console) as log:
        log.step(step=1, loss=1.2345)
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "\n", text.getvalue())
    assert "1/400000" in shown and "loss 1.2345" in shown and "…" not in shown
    assert ("0:00:00" in shown) == (width == 80)


def test_an_exception_passes_through_and_leaves_the_terminal_and_the_file_whole(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, legacy_windows=False)
    log = Logger(None, 4, console=console, json=tmp_path / "log")

    def training():
        with log:
            log.step(loss=0.5)
            log.epoch(epoch=1)
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        training()
    assert "\x1b[?25l" in text.getvalue() and "\x1b[?25h" in text.getvalue(), "the cursor is hidden, then shown"
    assert log._bar is None and log._file is None
    assert json.loads((tmp_path / "log").read_text())["epoch"] == 1
