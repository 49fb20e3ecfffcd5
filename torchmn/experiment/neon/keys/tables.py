"""The treatment of every key of every neon class. Classes and keys that are not listed here are errors.

It follows neon's code from 2014 to 0.9: keys that neon accepted and ignored have no effect here either, so that an old
file gives neon's numbers.
"""

from __future__ import annotations

from dataclasses import replace

from torchmn.experiment.neon.keys.decisions import AllowedValues, Keys
from torchmn.experiment.neon.keys.layer_tables import BACKEND, FLOAT32, LAYERS, MEMORY, NAME, dtypes, same
from torchmn.experiment.neon.keys.rule_types import RULE_CLASSES

OUTPUTS = "outputs are options of the command line: --out DIR, with its log"
ANCHOR_KEYS = ("weight_init", "weight_inits", "wt_cfgs", "wt_init", "lrule", "lrules", "wp", "ww", "cost", "layers")
"""Keys of an experiment in which neon's files define anchors, and which neon itself ignores."""


# Experiments and back ends ----------------------------------------------------------------------------------------

_RUN = {
    "logging": OUTPUTS,
    "diagnostics": "it timed neon's operations: -s profiles a run",
    "return_item": "it was for a search tool that is not part of TorchMN",
    "timing_plots": OUTPUTS,
}
_INFERENCE = ("inference_sets", "inference_metrics")
"""Splits and metrics of neon's files before `metrics`."""
_FIGURES = "no figure is drawn: `predictions: [test]` writes the outputs"
_ERRORS = "the numbers of every epoch are written with --out DIR"


def _experiment(*read: str, **ignored: str) -> Keys:
    common = ("dataset", "datasets", "model", "backend", "dist_flag", "dist_mode")
    live = {"live": AllowedValues((False,), "it made predictions without training")}
    return Keys((*common, *read), (), live, _RUN | ignored, {}, dict.fromkeys(_INFERENCE, "metrics"))


_PREDICT = ("metrics", "predictions", *_INFERENCE)
EXPERIMENTS = {
    "FitExperiment": _experiment(**dict.fromkeys(_PREDICT, "neon's FitExperiment ignores it")),
    "FitPredictErrorExperiment": _experiment(*_PREDICT),
    "GenOutputExperiment": _experiment(
        *_PREDICT, **dict.fromkeys(("zparam", "olayout", "fshape", "figure_filename"), _FIGURES)
    ),
    "WriteErrorToFile": _experiment(*_PREDICT, filename=_ERRORS, item=_ERRORS),
}
_BACKEND = Keys(
    read=("rng_seed",),
    only={"stochastic_round": AllowedValues((False,), "numbers are rounded to the nearest here")},
    ignored={
        "seterr_handling": "it controlled NumPy's warnings about overflows",
        "device_id": "the local rank determines the device",
        "num_dev": "the number of ranks is an option of the command line: -n",
    },
)
_EMULATED = {
    **dict.fromkeys(("default_dtype", "default_flex_dtype", "use_flex_dtype"), FLOAT32.note),
    **dict.fromkeys(
        ("module_logging_levels", "use_compiler", "compute_engine"),
        "it belongs to an emulator of hardware that is not part of TorchMN",
    ),
}
EMULATORS = ("FixedPoint", "Flexpoint", "NRVBackend")
"""Back ends that emulated hardware with numbers in fixed point."""
BACKENDS = {
    **same("CPU CPUData GPU GPUData Cudamat Cudanet Numpy", _BACKEND),
    **dict.fromkeys(EMULATORS, replace(_BACKEND, ignored={**_BACKEND.ignored, **_EMULATED})),
}

# Models -----------------------------------------------------------------------------------------------------------

LAST = ("num_epochs", "batch_size", "layers")
_MODEL_ONLY = dtypes("temp_dtype")
_MODEL_IGNORED = BACKEND | {
    **dict.fromkeys(
        ("serialized_path", "pickle"),
        "--out DIR keeps checkpoints, for any number of ranks, and --resume continues from them",
    ),
    "overwrite_list": "it belongs to neon's saved models, which are not read",
    "serialize_schedule": OUTPUTS,
    "save_checkpoints": OUTPUTS,
    "step_print": OUTPUTS,
    "timing_plots": OUTPUTS,
    "make_plots": OUTPUTS,
    "reuse_deltas": MEMORY,
    "accumulate": "gradients of several costs are always summed here",
    "batch_norm": "neon's models ignore it: it is an option of layers",
}
_MODEL_CHECKED = ("dataset", "deserialized_path", "depickle")


def _model(*read: str, **ignored: str) -> Keys:
    return Keys((*LAST, "dist_mode", "dist_flag", *read), _MODEL_CHECKED, _MODEL_ONLY, _MODEL_IGNORED | ignored)


def _afterwards(name: str) -> AllowedValues:
    note = f"it does not change the training: call torchmn.models.{name} of the trained model"
    return AllowedValues((False,), "expected True or False", (True,), note)


_CHAIN = _model("cost", "epoch_metrics", "learning_rate", "momentum", "momentum_params")
MODELS = {
    **same("MLP MLPB Convnet Autoencoder", _CHAIN),
    "Balance": _model(
        "epoch_metrics", "learning_rate", "momentum", "momentum_params", "classlayers", "stylelayers",
        zidx="it belongs to the figures of GenOutputExperiment",
    ),
    "GB": Keys(
        (*LAST, "dist_mode", "dist_flag", "pretraining", "num_pretrain_epochs", "num_initial_epochs", "epoch_metrics"),
        ("cost", "pretrain_cost", *_MODEL_CHECKED),
        _MODEL_ONLY | {"visualize": _afterwards("visualize"), "spot_check": _afterwards("spot_check")},
        _MODEL_IGNORED,
    ),
}  # fmt: skip

# Data sets --------------------------------------------------------------------------------------------------------

_DIST = ("dist_flag", "dist_mode", "batch_size")
_DATA_IGNORED = BACKEND | {
    "serialized_path": "data is cached by its content, and each rank reads only its part",
    "overwrite_list": "it belongs to neon's saved data sets, which are not read",
}
_DATA_REFUSED = {
    "test_pct": "this data set has a separate test split",
    "num_test_sample": "all test samples are used",
}


def _data(*read: str, refused: tuple[str, ...] = ("test_pct",), **ignored: str) -> Keys:
    return Keys(
        ("repo_path", "sample_pct", "validation_pct", *_DIST, *read),
        (),
        dtypes(),
        _DATA_IGNORED | ignored,
        {key: _DATA_REFUSED[key] for key in refused},
    )


def _without_files(keys: Keys, reason: str) -> Keys:
    read = tuple(key for key in keys.read if key != "repo_path")
    return replace(keys, read=read, ignored={**keys.ignored, "repo_path": reason})


_MACRO = "no macro batches are written: images are read from their files"
DATASETS = {
    "MNIST": _data(
        num_test_sample="it made the test set divisible by the number of ranks: all samples are tested here"
    ),
    "CIFAR10": _data(),
    "CIFAR100": _data("coarse_labels"),
    "Iris": _without_files(_data(), "the data set is included in TorchMN"),
    "ToyImages": _without_files(_data(), "the images are generated"),
    "Housing": _data("test_pct", refused=()),
    "SPARSENET": _data(),
    "MOBYDICK": _data("unrolls", data_dim="the number of distinct characters follows from the text"),
    "UniformRandom": Keys(
        ("ntrain", "ntest", "nin", "nout", "validation_pct", *_DIST),
        (),
        dtypes(),
        _DATA_IGNORED | {"repo_path": "nothing is read from files", "sample_pct": "neon's UniformRandom ignores it"},
    ),
    "Imageset": Keys(
        (
            "repo_path",
            "image_dir",
            "imageset",
            "cropped_image_size",
            "output_image_size",
            "num_channels",
            "mean_norm",
            "unit_norm",
            "ntrain",
            "macro_size",
            *_DIST,
        ),
        (),
        dtypes()
        | {
            "dotransforms": AllowedValues((False,), "random crops and mirroring are not supported"),
            "shuffle_macro": AllowedValues((False,), "use `shuffle: true` in TorchMN's format"),
        },
        _DATA_IGNORED
        | dict.fromkeys(("save_dir", "num_workers", "preprocess_done", "tdims", "train_start", "val_start"), _MACRO)
        | {
            "square_crop": "images are scaled to cropped_image_size, and not cropped: crop them before",
            "nclass": "the number of classes is that of the folders",
            "sample_pct": "neon's Imageset ignores it",
            "nval": "the images that are held out are the validation images, all of them",
        },
        {"label_list": "images have one label each, that of their folder"},
    ),
}

# Costs, metrics, activations, initial weights ---------------------------------------------------------------------

_COST_IGNORED = BACKEND | {"batch_size": "neon gives a cost the batch size of the model"}
_OLAYER = ("olayer",)
SHORTCUT = {
    "shortcut_deriv": "the derivative is the same either way; here it is computed in one step, y - t, which does not "
    "vanish where outputs round to 0 or 1"
}
COSTS = {
    "CrossEntropy": Keys(
        ("scale",), _OLAYER, dtypes("temp_dtype"),
        _COST_IGNORED
        | SHORTCUT
        | {
            "epsilon": "it kept neon's logarithm finite",
            "use_binary": "neon uses the binary form after Logistic, and the other one after Softmax",
        },
    ),
    "SumSquaredDiffs": Keys(("scale",), _OLAYER, dtypes("temp_dtype"), _COST_IGNORED),
    "XCovariance": Keys(("scale", "blkidx"), _OLAYER, dtypes("temp_dtype"), _COST_IGNORED),
}  # fmt: skip
METRICS = {
    **same("MisclassRate MisclassPercentage MisclassSum", Keys(("error_rank",))),
    **same("LogLossMean LogLossSum", Keys(ignored={"eps": "it kept neon's logarithm finite"})),
    **same("AUC SSE MSE", Keys()),
}
SPLITS = {"metrics": Keys(("train", "test", "validation"))}
ACTIVATIONS = {
    **same("RectLin Tanh Linear", Keys()),
    **same("Logistic Softmax", Keys(ignored=SHORTCUT)),
    "RectLeaky": Keys(("slope",)),
}
_FILL = BACKEND | NAME | {"type": "it follows from the class"}
_NOT_LOCAL = dict.fromkeys(("is_local", "islocal"), "it does not change these values")
_NOT_READ = "neon's class ignores it"


def _initializer(*read: str, local: bool = False, **ignored: str) -> Keys:
    where = () if not local else ("is_local", "islocal")
    return Keys(
        (*read, "bias_init", *where), ignored=_FILL | ({} if local else _NOT_LOCAL) | ignored
    )  # fmt: skip


INITIALIZERS = {
    "UniformValGen": _initializer("low", "high", relu=_NOT_READ),
    "AutoUniformValGen": _initializer("relu", local=True, scale=_NOT_READ),
    "GaussianValGen": _initializer("loc", "scale"),
    "NormalValGen": _initializer("loc", "scale"),
    "NodeNormalizedValGen": _initializer("scale"),
    "SparseEigenValGen": _initializer("sparseness", "eigenvalue"),
    "OrthoNormalizedValGen": _initializer("relu"),
}
# Before neon's release: {type: uniform, low: ..., high: ...}
PLAIN_INITIALIZERS = {"uniform": "UniformValGen", "gaussian": "GaussianValGen", "normal": "GaussianValGen",
                      "node_normalized": "NodeNormalizedValGen", "sparse_eigenval": "SparseEigenValGen",
                      "autoscale": "AutoUniformValGen"}  # fmt: skip
_PLAIN = {
    f"weight_init of {kind}": Keys(
        (*INITIALIZERS[name].read, "type"),
        ignored={key: reason for key, reason in INITIALIZERS[name].ignored.items() if key != "type"},
    )
    for kind, name in PLAIN_INITIALIZERS.items()
}

# Learning rules ---------------------------------------------------------------------------------------------------

_PARAMS = ("learning_rate", "pretrain_learning_rate", "weight_decay", "momentum_params", "schedule", "rho", "epsilon",
           "gamma")  # fmt: skip
RULES = {
    "gradient_descent": ("learning_rate",),
    "gradient_descent_pretrain": ("learning_rate", "pretrain_learning_rate"),
    "gradient_descent_momentum": ("learning_rate", "momentum_params", "schedule"),
    "gradient_descent_momentum_weight_decay": ("learning_rate", "momentum_params", "schedule", "weight_decay"),
    "adadelta": ("rho", "epsilon"),
    "rmsprop": ("learning_rate", "momentum_params", "schedule", "gamma", "epsilon"),
}
"""The parameters that neon's rules apply; they accept the others and ignore them."""
MOMENTA = {
    "constant": ("coef", "initial_coef"),
    "nesterov": ("coef", "initial_coef"),
    "linear_monotone": ("coef", "initial_coef", "saturated_coef", "start_epoch", "saturate_epoch"),
}
_RULE_ONLY = dtypes("param_dtype", "gradient_dtype", "velocity_dtype")
LEARNING = {
    "lrule_init": Keys(("type", "lr_params"), (), _RULE_ONLY, NAME),
    **dict.fromkeys(RULE_CLASSES, Keys(("lr_params",), (), _RULE_ONLY, BACKEND | NAME)),
    **{
        f"lr_params of {rule}": Keys(
            params,
            ignored=BACKEND
            | {key: f"neon's {rule} ignores it" for key in _PARAMS if key not in params},
        )
        for rule, params in RULES.items()
    },
    **{
        f"momentum_params of {kind}": Keys(
            (*params, "type"),
            ignored={
                key: "only a linear_monotone momentum changes"
                for key in MOMENTA["linear_monotone"]
                if key not in params
            },
        )
        for kind, params in MOMENTA.items()
    },
    "schedule": Keys(("type", "ratio", "step_epochs")),
}  # fmt: skip

KEYS: dict[str, dict[str, Keys]] = {
    "experiments": EXPERIMENTS,
    "back ends": BACKENDS,
    "models": MODELS,
    "data sets": DATASETS,
    "layers": LAYERS,
    "costs": COSTS,
    "metrics": METRICS | SPLITS,
    "activations": ACTIVATIONS,
    "initial weights": INITIALIZERS | _PLAIN,
    "learning rules": LEARNING,
}
"""For each kind of class, the treatment of the keys of its classes; names as in files, without `Dist`."""
