"""The names of neon's Python classes and functions, and what each is here."""

from __future__ import annotations

from torchmn.other_spellings import OtherName


def _each(names: str, note: str) -> list[OtherName]:
    return [OtherName(name, note=note) for name in names.split()]


_TILES = 'torchmn.parallelize(model, grid, "halopar")'
_SLICES = 'torchmn.parallelize(model, grid, "vecpar")'
_FILE = "`torchmn train FILE` trains neon's files with it"
NAMES: tuple[OtherName, ...] = (
    *_each("ConvLayerDist ConvLayer", f"torch.nn.Conv2d in a model, then {_TILES}"),
    *_each("MaxPoolingLayerDist MaxPoolingLayer", f"torch.nn.MaxPool2d in a model, then {_TILES}"),
    *_each("AveragePoolingLayerDist AveragePoolingLayer", f"torch.nn.AvgPool2d in a model, then {_TILES}"),
    *_each("L2PoolingLayerDist L2PoolingLayer", f"torchmn.nn.L2Pool2d in a model, then {_TILES}"),
    *_each("PoolingLayer", f"torch.nn.MaxPool2d, torch.nn.AvgPool2d or torchmn.nn.L2Pool2d in a model, then {_TILES}"),
    *_each("LocalFilteringLayerDist LocalFilteringLayer", f"torchmn.nn.LocalFilter2d in a model, then {_TILES}"),
    *_each("LocalDeFilteringLayer", "torchmn.nn.LocalFilter2d.transpose"),
    *_each("LCNLayerDist LCNLayer", f"torchmn.nn.LocalContrastNorm2d in a model, then {_TILES}"),
    *_each("LocalContrastNormLayer", 'torchmn.nn.LocalContrastNorm2d(kernel, maps, "response")'),
    *_each("CrossMapResponseNormLayer", "torchmn.nn.CrossMapResponseNorm"),
    *_each("CrossMapPoolingLayer", "torch.nn.Conv2d with kernel 1, or torchmn.nn.CrossMapPool"),
    *_each("LayerDist Layer FCLayer AELayer", f"torch.nn.Linear in a model, then {_SLICES}"),
    *_each("LayerWithNoBiasDist LayerWithNoBias", f"torch.nn.Linear with bias=False in a model, then {_SLICES}"),
    *_each("DropOutLayer", "torch.nn.Dropout, whose argument is the probability to drop"),
    *_each("ActivationLayer", "torch.nn.ReLU and other activations of PyTorch"),
    *_each("BranchLayer ListLayer SliceLayer", f"a torch.nn.Module with this forward; {_FILE}"),
    *_each("DataLayer ImageDataLayer", "torchmn.scatter_dataset and torch.utils.data.DataLoader"),
    *_each("CostLayer", "torch.nn.CrossEntropyLoss and other losses of PyTorch"),
    OtherName("ConvnetDist", "models.ConvnetDist"),
    OtherName("GBDist", "models.GBDist"),
    OtherName("MLPDist", "models.MLPDist"),
    OtherName("GB", "models.SparseAutoencoder"),
    OtherName("MLP", "models.mlp"),
    OtherName("Convnet", "models.convnet"),
    *_each("MLPB", "torchmn.models.mlp"),
    *_each("Autoencoder Balance", f"a torch.nn.Module with this forward; {_FILE}"),
    *_each("RBM DBN", "the layer `- rbm: {units: 500}` of `torchmn train FILE`"),
    *_each("RNN", "torch.nn.RNN, or torchmn.nn.create_multi_node_n_step_rnn over ranks"),
    OtherName("GlobalArray", "GlobalArray"),
    *_each("LocalArray", "torchmn.GlobalArray"),
    *_each("MNISTDist CIFAR10Dist", "torchmn.data.scatter_regions for tiles, torchmn.scatter_dataset for samples"),
    *_each("CPUDataDist GPUDataDist", "torchmn.create_multi_node_optimizer"),
    *_each("gen_backend", "torchmn.create_communicator"),
    *_each("adjust_for_dist", "torchmn.parallelize, which returns the model of this rank"),
    *_each("set_dist_mode DataPar ModelPar", 'the mode of torchmn.parallelize, such as "datapar" or "modelpar"'),
)
"""Classes of layers and models, and the classes and functions of neon's MPI code; names as in neon's modules."""
