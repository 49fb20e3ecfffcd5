"""The sparse autoencoder as an experiment's model: `autoencoder: {maps: 8, kernels: [4, 3, 3], ...}`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from torchmn.errors import ArgumentError
from torchmn.experiment.file.fields import Count, NotNegative, Positive
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary.layers.options import OwnRule, Shape, text
from torchmn.models import SparseAutoencoder


class Pretraining(BaseModel):
    """How each stack learns to reconstruct its input, before there are labels."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    epochs: int = Field(2, ge=0, description="how often each stack goes over the data")
    lr: Positive = 0.01


class Autoencoder(Options):
    """[local filters, L2 pool, contrast normalisation] for each of `kernels`, then a linear classifier.

    Its outputs are scores; the cost that goes with it is binary_cross_entropy.
    """

    maps: Count = Field(8, description="feature maps of every stack")
    kernels: list[Count] = Field([4, 3, 3], min_length=1, description="the filters' side in each stack")
    pool: Count = 3
    norm: Count = Field(3, description="the side of the normalisation's window, odd")
    classes: Count = 10
    tied: bool = Field(True, description="the decoder uses the encoder's filters")
    sparsity: NotNegative = 0.1
    pretraining: Pretraining = Field(default_factory=lambda: Pretraining(epochs=2))
    classifier_epochs: int = Field(1, ge=0, description="how many of the epochs train the classifier alone")
    classifier: OwnRule | None = Field(None, description="where the classifier learns otherwise, as {momentum: 0.9}")

    def build(self, shape: Shape) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(f"autoencoder needs images of shape (maps, height, width), got samples of {text(shape)}")
        try:
            model = SparseAutoencoder(
                len(self.kernels),
                in_maps=shape[0],
                in_size=(shape[1], shape[2]),
                maps=self.maps,
                kernel=list(self.kernels),
                pool=self.pool,
                norm=self.norm,
                classes=self.classes,
                tied=self.tied,
                sparsity=self.sparsity,
            )
        except ArgumentError as error:
            raise ValueError(str(error).removeprefix("SparseAutoencoder: ")) from error
        model.after_step = "unit_norm_"  # type: ignore[assignment]
        if self.classifier is not None:
            model.classifier.own_rule = self.classifier.as_group()  # type: ignore[assignment]
        return model
