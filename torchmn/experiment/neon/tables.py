"""The decision on every key of every neon class that is read. A class or a key that is not here is refused.

What neon did with each key was read off its code of 2014 to 0.9: keys that it took and never looked at are among those
without meaning, so that an old file gives neon's numbers and not what its author may have hoped for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmn.experiment.neon.keys import RULE_CLASSES, Keys, Only
from torchmn.experiment.neon.layer_tables import BACKEND, LAYERS, MEMORY, NAME, dtypes, same

OUTPUTS = "what a run reports and keeps is said on the command line: --out DIR, and its log"
HOLDERS = ("weight_init", "weight_inits", "wt_cfgs", "wt_init", "lrule", "lrules", "wp", "ww", "cost", "layers")
"""Keys of an experiment under which neon's files keep anchors, and which neon itself does not look at."""


# Experiments and back ends ----------------------------------------------------------------------------------------

_RUN = {
    "logging": OUTPUTS,
    "diagnostics": "it timed neon's own operations: -s profiles a run",
    "return_item": "the search tool that asked for it is not part of TorchMN",
    "timing_plots": OUTPUTS,
}
_SPLITS = {
    "inference_sets": "say the splits in `metrics: {train: [...], test: [...]}`, and in `predictions`",
    "inference_metrics": "say the metrics of each split in `metrics: {train: [...], test: [...]}`",
}
_FIGURES = "no figure is drawn: `predictions: [test]` writes the outputs"
_ERRORS = "the numbers of every epoch are written with --out DIR"


def _experiment(*read: str, **meaningless: str) -> Keys:
    running = ("dataset", "datasets", "model", "backend", "dist_flag", "dist_mode")
    live = {"live": Only((False,), "it made predictions without training")}
    return Keys((*running, *read), (), live, _RUN | meaningless, _SPLITS, dict.fromkeys(_SPLITS, "metrics"))


EXPERIMENTS = {
    "FitExperiment": _experiment(
        **dict.fromkeys(("metrics", "predictions"), "neon's FitExperiment does not look at it")
    ),
    "FitPredictErrorExperiment": _experiment("metrics", "predictions"),
    "GenOutputExperiment": _experiment(
        "metrics", "predictions", **dict.fromkeys(("zparam", "olayout", "fshape", "figure_filename"), _FIGURES)
    ),
    "WriteErrorToFile": _experiment("metrics", "predictions", filename=_ERRORS, item=_ERRORS),
}
BACKENDS = same(
    "CPU CPUData GPU GPUData Cudamat",
    Keys(
        read=("rng_seed",),
        only={"stochastic_round": Only((False,), "numbers are rounded to the nearest here")},
        meaningless={
            "seterr_handling": "how NumPy warned of overflows",
            "device_id": "each rank takes the device of its place on the host",
            "num_dev": "the number of ranks is said on the command line: -n",
        },
    ),
)

# Models -----------------------------------------------------------------------------------------------------------

LAST = ("num_epochs", "batch_size", "layers")
_MODEL_ONLY = dtypes("temp_dtype")
_MODEL_MEANINGLESS = BACKEND | {
    "serialized_path": "--out DIR keeps checkpoints, for any number of ranks, and --resume goes on from them",
    "overwrite_list": "it belongs to neon's saved models, which are not read",
    "serialize_schedule": OUTPUTS,
    "save_checkpoints": OUTPUTS,
    "step_print": OUTPUTS,
    "timing_plots": OUTPUTS,
    "make_plots": OUTPUTS,
    "reuse_deltas": MEMORY,
    "accumulate": "gradients of several costs are always summed here",
    "batch_norm": "neon's models do not look at it: each layer has its own",
    "dataset": "a model is trained on the experiment's data set",
}
_MODEL_REFUSED = {
    "deserialized_path": "neon's saved models are not read: leave it out to begin with the initial weights"
}


def _model(*read: str, **more: Any) -> Keys:
    meaningless = _MODEL_MEANINGLESS | more.pop("meaningless", {})
    only = _MODEL_ONLY | more.pop("only", {})
    return Keys((*LAST, "dist_mode", "dist_flag", *read), (), only, meaningless, _MODEL_REFUSED, **more)


_CHAIN = _model("cost", "epoch_metrics", "learning_rate", "momentum", "momentum_params")
MODELS = {
    **same("MLP MLPB Convnet Autoencoder", _CHAIN),
    "Balance": _model(
        "epoch_metrics", "learning_rate", "momentum", "momentum_params", "classlayers", "stylelayers",
        meaningless={"zidx": "it belongs to the figures of GenOutputExperiment"},
    ),
    "GB": Keys(
        (*LAST, "dist_mode", "dist_flag", "pretraining", "num_pretrain_epochs", "num_initial_epochs", "epoch_metrics"),
        ("cost", "pretrain_cost"),
        _MODEL_ONLY
        | dict.fromkeys(
            ("visualize", "spot_check"),
            Only((False,), "call torchmn.models.visualize and torchmn.models.spot_check of the trained model"),
        ),
        _MODEL_MEANINGLESS,
        _MODEL_REFUSED,
    ),
}  # fmt: skip

# Data sets --------------------------------------------------------------------------------------------------------

_DIST = ("dist_flag", "dist_mode", "batch_size")
_DATA_MEANINGLESS = BACKEND | {
    "serialized_path": "data is cached by its content, and each rank reads only its part",
    "overwrite_list": "it belongs to neon's saved data sets, which are not read",
}
_DATA_REFUSED = {
    "test_pct": "this data set has a test split of its own",
    "num_test_sample": "all test samples are used",
}


def _data(*read: str, refused: tuple[str, ...] = ("test_pct",), **meaningless: str) -> Keys:
    return Keys(
        ("repo_path", "sample_pct", "validation_pct", *_DIST, *read),
        (),
        dtypes(),
        _DATA_MEANINGLESS | meaningless,
        {key: _DATA_REFUSED[key] for key in refused},
    )


def _without_files(keys: Keys, why: str) -> Keys:
    read = tuple(key for key in keys.read if key != "repo_path")
    return replace(keys, read=read, meaningless={**keys.meaningless, "repo_path": why})


_MACRO = "no macro batches are written: images are read from their files"
DATASETS = {
    "MNIST": _data(
        num_test_sample="it made the test set divisible by the ranks: any number is, and all samples are tested"
    ),
    "CIFAR10": _data(),
    "CIFAR100": _data("coarse_labels"),
    "Iris": _without_files(_data(), "the flowers come with TorchMN"),
    "ToyImages": _without_files(_data(), "the images are drawn"),
    "Housing": _data("test_pct", refused=()),
    "SPARSENET": _data(),
    "MOBYDICK": _data("unrolls", data_dim="the number of different characters follows from the text"),
    "UniformRandom": Keys(
        ("ntrain", "ntest", "nin", "nout", "validation_pct", *_DIST),
        (),
        dtypes(),
        _DATA_MEANINGLESS
        | {"repo_path": "nothing is read from files", "sample_pct": "neon's UniformRandom does not look at it"},
    ),
    "Imageset": Keys(
        ("repo_path", "image_dir", "imageset", "cropped_image_size", "output_image_size", "num_channels", *_DIST),
        (),
        dtypes()
        | dict.fromkeys(("mean_norm", "unit_norm"), Only((False,), "values are between 0 and 1 here"))
        | {
            "dotransforms": Only((False,), "images are neither cropped nor mirrored at random"),
            "shuffle_macro": Only((False,), "say `shuffle: true` in our format"),
        },
        _DATA_MEANINGLESS
        | dict.fromkeys(("macro_size", "save_dir", "num_workers", "preprocess_done", "tdims"), _MACRO)
        | {
            "square_crop": "images are scaled to cropped_image_size, and not cropped: crop them before",
            "nclass": "the number of classes is that of the folders",
            "sample_pct": "neon's Imageset does not look at it",
        },
        dict.fromkeys(
            ("ntrain", "nval", "train_start", "val_start"),
            "there are no macro batches to count: `sample` in our format takes a share",
        )
        | {"label_list": "images have one label each, that of their folder"},
    ),
}

# Costs, metrics, activations, initial weights ---------------------------------------------------------------------

_COST_MEANINGLESS = BACKEND | {
    "batch_size": "neon gives a cost the batch size of the model",
    "olayer": "neon gives a cost the last layer",
}
SHORTCUT = Only(
    (True,),
    "the derivative of the cost and of the softmax or logistic before it is taken in one step, y - t, which does not "
    "vanish where outputs round to 0 or 1",
)
COSTS = {
    "CrossEntropy": Keys(
        ("scale",), (), dtypes("temp_dtype") | {"shortcut_deriv": SHORTCUT},
        _COST_MEANINGLESS
        | {
            "epsilon": "it kept neon's logarithm finite",
            "use_binary": "neon takes the binary form behind Logistic, and the other behind Softmax",
        },
    ),
    "SumSquaredDiffs": Keys(("scale",), (), dtypes("temp_dtype"), _COST_MEANINGLESS),
    "XCovariance": Keys(("scale", "blkidx"), (), dtypes("temp_dtype"), _COST_MEANINGLESS),
}  # fmt: skip
METRICS = {
    **same("MisclassRate MisclassPercentage MisclassSum", Keys(("error_rank",))),
    **same("LogLossMean LogLossSum", Keys(meaningless={"eps": "it kept neon's logarithm finite"})),
    **same("AUC SSE MSE", Keys()),
}
SPLITS = {"metrics": Keys(("train", "test", "validation"))}
ACTIVATIONS = {
    **same("Logistic RectLin Tanh Linear", Keys()),
    "Softmax": Keys(only={"shortcut_deriv": SHORTCUT}),
    "RectLeaky": Keys(("slope",)),
}
_FILL = BACKEND | NAME | {"type": "the class says it"}
_NOT_LOCAL = dict.fromkeys(("is_local", "islocal"), "it does not change these values")
_NOT_SEEN = "neon's class does not look at it"


def _initializer(*read: str, local: bool = False, **meaningless: str) -> Keys:
    where = () if not local else ("is_local", "islocal")
    return Keys(
        (*read, "bias_init", *where), meaningless=_FILL | ({} if local else _NOT_LOCAL) | meaningless
    )  # fmt: skip


INITIALIZERS = {
    "UniformValGen": _initializer("low", "high", relu=_NOT_SEEN),
    "AutoUniformValGen": _initializer("relu", local=True, scale=_NOT_SEEN),
    "GaussianValGen": _initializer("loc", "scale"),
    "NormalValGen": _initializer("loc", "scale"),
    "NodeNormalizedValGen": _initializer("scale"),
    "SparseEigenValGen": _initializer("sparseness", "eigenvalue"),
    "OrthoNormalizedValGen": _initializer("relu"),
}
# Before the release: {type: uniform, low: ..., high: ...}
PLAIN_INITIALIZERS = {"uniform": "UniformValGen", "gaussian": "GaussianValGen", "normal": "GaussianValGen",
                      "node_normalized": "NodeNormalizedValGen", "sparse_eigenval": "SparseEigenValGen"}  # fmt: skip
_PLAIN = {
    f"weight_init of {word}": Keys(
        (*INITIALIZERS[name].read, "type"),
        meaningless={key: why for key, why in INITIALIZERS[name].meaningless.items() if key != "type"},
    )
    for word, name in PLAIN_INITIALIZERS.items()
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
"""The parameters that neon's rules apply; they take the others, and do not look at them."""
MOMENTA = {
    "constant": ("coef", "initial_coef"),
    "nesterov": ("coef", "initial_coef"),
    "linear_monotone": ("coef", "initial_coef", "saturated_coef", "start_epoch", "saturate_epoch"),
}
_RULE_ONLY = dtypes("param_dtype", "gradient_dtype")
LEARNING = {
    "lrule_init": Keys(("type", "lr_params"), (), _RULE_ONLY, NAME),
    **dict.fromkeys(RULE_CLASSES, Keys(("lr_params",), (), _RULE_ONLY, BACKEND | NAME)),
    **{
        f"lr_params of {rule}": Keys(
            params,
            meaningless=BACKEND
            | {key: f"neon's {rule} does not apply it" for key in _PARAMS if key not in params},
        )
        for rule, params in RULES.items()
    },
    **{
        f"momentum_params of {kind}": Keys(
            (*params, "type"),
            meaningless={
                key: f"a {kind} momentum does not change" for key in MOMENTA["linear_monotone"] if key not in params
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
"""Of each kind of thing, the decisions on the keys of its classes; names as the files have them, without `Dist`."""
