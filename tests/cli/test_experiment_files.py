"""`torchmn new`, `schema`, `convert` and `verify`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests._worlds.launch import ROOT
from tests.cli.commands import main, starters, torchmn
from tests.cli.experiments import written
from torchmn.cli.commands.new import BATCH_SCRIPTS
from torchmn.experiment import load

OLD = ROOT / "tests" / "experiment" / "neon_files" / "public-cnn.yaml"


@pytest.mark.parametrize("name", sorted(starters()))
def test_new_writes_a_file_that_loads_and_never_overwrites_another(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 0
    assert f"torchmn train {name}.yaml" in capsys.readouterr().out
    assert Path(f"{name}.yaml").read_text().startswith("# ") and load(f"{name}.yaml").epochs >= 1
    with pytest.raises(SystemExit) as ended:
        main(["new", name])
    assert ended.value.code == 2 and "already exists" in capsys.readouterr().err


def test_new_slurm_writes_two_batch_scripts_and_never_overwrites_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "slurm"]) == 0
    assert "sbatch slurm-mpi.sbatch mnist-cnn.yaml" in capsys.readouterr().out
    for name in BATCH_SCRIPTS:
        text = Path(name).read_text()
        assert "#SBATCH --requeue" in text and "--resume=auto" in text
        subprocess.run(["bash", "-n", name], check=True)
    Path(BATCH_SCRIPTS[0]).unlink()
    with pytest.raises(SystemExit):
        main(["new", "slurm"])
    assert f"{BATCH_SCRIPTS[1]} already exists" in capsys.readouterr().err and not Path(BATCH_SCRIPTS[0]).exists()


def test_new_offers_the_nearest_name_and_lists_them(capsys):
    with pytest.raises(SystemExit):
        main(["new", "mnist-cn"])
    assert "Did you mean 'mnist-cnn'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    shown = capsys.readouterr().out
    assert "mnist-cnn" in starters()
    assert [name for name in [*starters(), "slurm"] if name not in shown] == []


def test_schema_prints_json(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "TorchMN experiment"


def test_convert_writes_the_new_format_and_lists_keys_without_effect(tmp_path, capsys):
    new = tmp_path / "new.yaml"
    assert main(["convert", str(OLD), str(new)]) == 0
    assert f"{OLD}:47:12: logging has no effect: outputs are options of the command line" in capsys.readouterr().err
    assert load(new).model_dump() == load(OLD).model_dump()
    assert main(["convert", str(OLD)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(new.read_text())
    with pytest.raises(SystemExit):
        main(["convert", str(OLD), str(tmp_path / "no" / "new.yaml")])
    assert "new.yaml (No such file or directory)" in capsys.readouterr().err
    new.write_text(OLD.read_text().replace("ConvLayer", "ConvLyer"))
    assert main(["convert", str(new)]) == 2
    assert capsys.readouterr().err.startswith(
        f"{new}:36:7: the layer ConvLyer is not supported. Did you mean 'ConvLayer'?"
    )


def test_verify_shows_that_every_mode_gives_the_same_numbers(tmp_path):
    narrow = {"COLUMNS": "20"}  # where no column may be left out
    arguments = ("verify", written(tmp_path), "-n", "2", "--transport", "gloo", "--steps", "2")
    result = torchmn(*arguments, warm=True, env=narrow)
    assert result.status == 0, result.err
    rows = re.findall(r"^(\w+) +(\d \(\w+\)).* same *$", result.out, re.M)
    assert [row[0] for row in rows] == ["datapar", "modelpar", "halopar", "halopar"]
    assert "Same numbers in 4 configurations" in result.out
