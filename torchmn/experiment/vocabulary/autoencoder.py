"""Options of the sparse autoencoder as a model: `autoencoder: {maps: 8, kernels: [4, 3, 3], ...}`."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from torchmn.errors import ArgumentError
from torchmn.experiment.file.fields import Count, NotNegative, Positive
from torchmn.experiment.file.registry import Options, Section
from torchmn.experiment.vocabulary.layers.options import (
    LayerOptimizerField,
    Shape,
    format_shape,
    optimizer_group,
    set_attributes,
)
from torchmn.models import SparseAutoencoder


class Pretraining(Section):
    """Options of the unsupervised pretraining, in which each stack learns to reconstruct its input."""

    epochs: int = Field(2, ge=0, description="number of passes of each stack over the data")
    lr: Positive = 0.01


class Autoencoder(Options):
    """A stack of [local filters, L2 pool, contrast normalisation] per entry of `kernels`, then a linear classifier.

    Its outputs are logits; the matching cost is binary_cross_entropy.
    """

    maps: Count = Field(8, description="number of feature maps of each stack")
    kernels: list[Count] = Field([4, 3, 3], min_length=1, description="height and width of the filters of each stack")
    pool: Count = 3
    norm: Count = Field(3, description="height and width of the normalisation window, odd")
    classes: Count = 10
    tied: bool = Field(True, description="whether the decoder uses the encoder's filters")
    sparsity: NotNegative = 0.1
    pretraining: Pretraining = Field(default_factory=lambda: Pretraining(epochs=2))
    classifier_epochs: int = Field(1, ge=0, description="number of first epochs that train the classifier only")
    classifier: LayerOptimizerField = Field(
        None, description="optimizer options of the classifier, such as {momentum: 0.9}, or another optimizer"
    )

    def build(self, shape: Shape) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(
                f"autoencoder needs images of shape (maps, height, width), got samples of shape {format_shape(shape)}"
            )
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
        set_attributes(model, after_step="unit_norm_")
        if self.classifier is not None:
            set_attributes(model.classifier, optimizer_options=optimizer_group(self.classifier))
        return model
