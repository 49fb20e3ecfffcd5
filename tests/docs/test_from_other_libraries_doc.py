"""docs/from-ddp.md, from-horovod.md, from-accelerate.md: scripts run, and train the same weights before and after."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests._worlds import run_job
from tests.docs.pages import assert_contents_are_the_sections, assert_public_names_and_links_exist, page

PAGES = ("from-ddp.md", "from-horovod.md", "from-accelerate.md")


def script(name: str, heading: str) -> str:
    section = page(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```py(?:thon)?\n(.*?)```", section, re.DOTALL)
    return text


def weights_of(text: str, n: int, transport: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a script saves on rank 0."""
    path = folder / f"{transport}-{n}.pt"
    job = run_job(text.replace('"model.pt"', repr(str(path))), n, transport, timeout=150)
    assert job.returncode == 0, job.output
    return torch.load(path)


def test_the_ddp_script_over_gloo_and_its_translation_have_equal_weights_after_five_steps(tmp_path):
    ddp = weights_of(script("from-ddp.md", "The DDP script"), 2, "gloo", tmp_path)
    translated = weights_of(script("from-ddp.md", "The same with TorchMN"), 2, "mpi", tmp_path)
    torch.testing.assert_close(translated, ddp, rtol=1e-5, atol=1e-7)


CHECKPOINTS = """
import io
import torch, torchmn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
comm = torchmn.create_communicator()
torchmn.init_process_group(comm)
x = torch.randn(6, 5, generator=torch.Generator().manual_seed(comm.rank))


class Training:
    def __init__(self, is_ddp, saved=None):
        torch.manual_seed(3)
        self.plain = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.model = DistributedDataParallel(self.plain) if is_ddp else self.plain
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        if not is_ddp:
            self.optimizer = torchmn.create_multi_node_optimizer(self.optimizer, comm, model=self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.1)
        if saved is not None:
            for part, state in zip(self.parts(), torch.load(io.BytesIO(saved))):
                part.load_state_dict(state)

    def parts(self):
        return self.plain, self.optimizer, self.scheduler

    def saved(self):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts()], file)
        return comm.bcast_obj(file.getvalue())

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            mse_loss(self.model(x), x[:, :2]).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self


for first, second in ((True, False), (False, True)):
    straight = Training(first).steps(5)
    resumed = Training(second, Training(first).steps(2).saved()).steps(3)
    torch.testing.assert_close(list(resumed.plain.parameters()), list(straight.plain.parameters()), rtol=1e-12, atol=0)
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()
"""


def test_checkpoints_of_a_ddp_script_and_of_its_translation_resume_the_other_one():
    job = run_job(CHECKPOINTS, 2, "gloo", timeout=150)
    assert job.returncode == 0, job.output


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_the_translated_scripts_run(n, transport, tmp_path):
    """In one job, because a start costs more than they do."""
    texts = [script(name, "The same with TorchMN").replace("model.pt", f"{tmp_path}/{name}.pt") for name in PAGES]
    job = run_job(f"for text in {texts!r}:\n    exec(text, {{}})", n, transport, timeout=150)
    assert job.returncode == 0, job.output
    assert all(torch.load(tmp_path / f"{name}.pt") for name in PAGES)


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_original_script_has_the_weights_of_its_translation(library, tmp_path):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    heading = {"accelerate": "The Accelerate script", "lightning": "The Fabric script"}[library]
    original = weights_of(script("from-accelerate.md", heading), 2, "gloo", tmp_path)
    # Their loaders distribute samples in turn: the translation gets the same ones.
    turns = {
        "accelerate": "[start + 32 * comm.rank + i for start in range(0, 6000, 64) for i in range(32)][:160]",
        "lightning": "range(comm.rank, 6000, 2)",
    }
    translation = script("from-accelerate.md", "The same with TorchMN").replace(
        'torchmn.scatter_dataset(mnist("train"), comm)',
        f'torch.utils.data.Subset(mnist("train"), {turns[library]})',
    )
    translated = weights_of(translation, 2, "mpi", tmp_path)
    torch.testing.assert_close(translated, original, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", PAGES)
def test_contents_names_and_links(name):
    assert_contents_are_the_sections(page(name))
    assert_public_names_and_links_exist(page(name))
