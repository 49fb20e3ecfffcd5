"""Experiment files in the forms that neon's had from 2014 to 2015, and the table of them for docs/from-neon.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "neon_files"


@dataclass(frozen=True)
class Sample:
    """An experiment file.

    Attributes:
        path: in `FOLDER`, without suffix.
        form: the versions of neon with files of this form.
        contents: data set, model, and what else the file has.
        mode: the mode that it names; empty for one process.
    """

    path: str
    form: str
    contents: str
    mode: str = ""

    @property
    def name(self) -> str:
        return f"{Path(self.path).name}.yaml"

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.path}.yaml").read_text()

    @property
    def needs_cifar(self) -> bool:
        return "cifar10" in self.path

    def changes(self) -> list[str]:
        """Returns `--set` options for a short training in float64."""
        made = ["dtype=float64", "epochs=1", "batch_size=20"]
        if self.needs_cifar:
            made.append("dataset.train_sample=60%")
        elif not ("iris" in self.path or "toy" in self.path):
            made.append("dataset.sample=1%")
        if "gb" in self.path:
            made += ["model.autoencoder.pretraining.epochs=1", "model.autoencoder.classifier_epochs=0"]
        return made


_OLD, _PUBLIC = "2014", "0.8 and 0.9"
SAMPLES = (
    Sample("2014/mnist_datapar_cpu_mlp-784-100-10", _OLD, "MNIST, MLP 784-100-10", "datapar"),
    Sample("2014/mnist_datapar_gpu_cnn-20-50-500-10", _OLD, "MNIST, convnet 20-50-500-10, `GPUDataDist`", "datapar"),
    Sample("2014/mnist_vecpar_cpu_mlp-784-100-10", _OLD, "MNIST, MLP 784-100-10, `MLPDist`", "vecpar"),
    Sample("2014/mnist_halopar_cpu_cnn-20-50-500-10", _OLD, "MNIST, convnet 20-50-500-10, `ConvnetDist`", "halopar"),
    Sample("2014/mnist_halopar_cpu_gb", _OLD, "MNIST, sparse autoencoder, `GBDist`", "halopar"),
    Sample("2014/cifar10_vecpar_cpu_mlp-3072-64-10", _OLD, "CIFAR-10, MLP 3072-64-10, `MLPDist`", "vecpar"),
    Sample("2014/cifar10_halopar_cpu_cnn-16-32-10", _OLD, "CIFAR-10, convnet 16-32-10, `ConvnetDist`", "halopar"),
    Sample("2014/cifar10_halopar_cpu_gb", _OLD, "CIFAR-10, sparse autoencoder, `GBDist`", "halopar"),
    Sample("halopar-cnn", _OLD, "MNIST, convnet, rules as mappings", "halopar"),
    Sample("halopar-gb", _OLD, "MNIST, sparse autoencoder of two stacks, rules as mappings", "halopar"),
    Sample("2014/mnist_cpu_mlp-784-100-10_rates", _OLD, "MNIST, MLP with learning rates of layers, types of numbers"),
    Sample("2014/mnist_fixedpoint_mlp-784-100-10", _OLD, "MNIST, MLP in fixed point: float32 here"),
    Sample("2014/mnist_cpu_autoencoder", _OLD, "MNIST, `Autoencoder` of `AELayer`"),
    Sample("2014/iris_cpu_mlp-4-20-3", "0.5 to 0.7", "Iris, MLP, `inference_sets`, `olayer`, data set in `DataLayer`"),
    Sample("2014/cifar10_cudamat_cnn", _OLD, "CIFAR-10, convnet with pooling, normalising and dropout layers of 2014"),
    Sample("public-cnn", _PUBLIC, "MNIST, convnet with dropout, schedules and metrics"),
    Sample("public/half-precision", _PUBLIC, "MNIST, MLP in half precision: float32 here; default weights and rule"),
    Sample("public/rules", _PUBLIC, "MNIST, convnet with momentum, AdaDelta in other layers, and `brule_init`"),
    Sample("public/maxout", _PUBLIC, "MNIST, convnet with `maxout` and a `BranchLayer`"),
    Sample("toy-images", _PUBLIC, "ToyImages, convnet"),
    Sample("balance", _PUBLIC, "MNIST, `Balance` with three costs"),
)  # fmt: skip
DISTRIBUTED = tuple(sample for sample in SAMPLES if sample.mode)


def samples_table() -> str:
    """Returns the samples as a Markdown table."""
    lines = ["| file | neon | contents | mode |", "|---|---|---|---|"]
    return "\n".join(
        lines
        + [
            f"| `{sample.path}` | {sample.form} | {sample.contents} | {sample.mode or 'one rank'} |"
            for sample in SAMPLES
        ]
    )
