"""The treatment of every key of neon's layers, for `tables`."""

from __future__ import annotations

from collections.abc import Mapping

from torchmn.experiment.neon.keys.decisions import AllowedValues, Keys

FLOAT32 = AllowedValues(
    ("np.float32", "float32", "numpy.float32"),
    "numbers are float32 here, or float64 with `dtype: float64` in TorchMN's format",
    ("np.float16", "float16", "numpy.float16", "fixpt_dtype", "flexpt_dtype"),
    "numbers are float32 here: neon's shorter types saved memory of GPUs, or emulated hardware",
)
BACKEND = {"backend": "PyTorch computes, on the device of each rank"}
NAME = {"name": "a label in neon's logs"}
MEMORY = "it controlled neon's use of memory"


def same(names: str, keys: Keys) -> dict[str, Keys]:
    return dict.fromkeys(names.split(), keys)


def dtypes(*names: str) -> dict[str, AllowedValues]:
    half = AllowedValues((False,), "expected True or False", (True,), FLOAT32.note)
    return {**dict.fromkeys(("backend_type", *names), FLOAT32), "half_precision": half}


_LAYER_IGNORED = (
    BACKEND
    | NAME
    | {
        "pos": "the position of a layer is that in the list",
        "prev_names": "neon connects layers in the order of the list",
        "prev_layer": "neon connects layers in the order of the list",
    }
)
_LAYER_ONLY = dtypes(
    "weight_dtype", "output_dtype", "pre_act_dtype", "deltas_dtype", "delta_dtype", "updates_dtype", "velocity_dtype",
    "berror_dtype",
)  # fmt: skip
_SAMPLE = ("batch_size", "nin")
_IMAGE = (*_SAMPLE, "nifm", "ifmshape")
_RULE = ("learning_rule", "lrule_init", "learning_rate")
_WEIGHTS = ("weight_init", *_RULE, "activation")
_NO_WEIGHTS: dict[str, str] = dict.fromkeys(
    ("weight_init", *_RULE, "brule_init", "batch_norm"), "the layer has no weights"
)


def _layer(
    read: tuple[str, ...], checked: tuple[str, ...], local: bool, ignored: dict[str, str] | None = None,
    only: Mapping[str, AllowedValues] | None = None, refused: Mapping[str, str] | None = None,
) -> Keys:  # fmt: skip
    is_local = AllowedValues((local,), "whether a layer is local follows from its class")
    return Keys(
        read,
        checked,
        {**_LAYER_ONLY, "is_local": is_local, **(only or {})},
        _LAYER_IGNORED | (ignored or {}),
        refused or {},
    )


_POOL_IGNORED = _NO_WEIGHTS | {"activation": "neon's pooling and normalising layers apply none"}


def _pool(*read: str) -> Keys:
    only = {} if "maxout" in read else {"maxout": AllowedValues((1,), "only maxima are taken over maps")}
    return _layer((*read, "fshape", "stride", "pad"), (*_IMAGE, "nfm", "nofm"), True, _POOL_IGNORED, only)


def _norm(only: Mapping[str, AllowedValues] | None = None) -> Keys:
    return _layer(("ksize", "alpha", "beta"), _IMAGE, True, _POOL_IGNORED, only)


LAYERS = {
    **same(
        "DataLayer ImageDataLayer",
        Keys(
            (),
            ("is_local", "nout", "nofm", "ofmshape", "batch_size", "dataset"),
            _LAYER_ONLY,
            _LAYER_IGNORED | {"has_labels": "labels are class indices here"},
        ),
    ),
    "CostLayer": Keys(
        ("cost", "ref_label"),
        ("ref_layer", "batch_size", "nin"),
        {**_LAYER_ONLY, "category_label": AllowedValues(("l_id",), "samples have one label each")},
        _LAYER_IGNORED | {"raw_label": "labels are class indices here"},
    ),
    **same(
        "FCLayer Layer LayerWithNoBias AELayer",
        _layer(("nout", *_WEIGHTS, "brule_init", "batch_norm"), _SAMPLE, False),
    ),
    "ConvLayer": _layer(
        ("nofm", "fshape", "stride", "pad", "local_conv", *_WEIGHTS, "brule_init", "batch_norm"),
        (*_IMAGE, "shared_bias"),
        True,
    ),
    "LocalFilteringLayer": _layer(
        ("nofm", "fshape", "stride", *_WEIGHTS, "sparsity", "tied_weights"),
        _IMAGE,
        True,
        ignored={"pretraining": "the model determines whether it is pretrained", "brule_init": "the layer has no bias"},
        refused={"batch_norm": "use ConvLayer with `local_conv: True`"},
    ),
    "PoolingLayer": _pool("op", "maxout"),
    "MaxPoolingLayer": _pool("maxout"),
    **same("L2PoolingLayer AveragePoolingLayer", _pool()),
    "LCNLayer": _layer(
        ("fshape",), (*_IMAGE, "nfm", "nofm"), True, _POOL_IGNORED,
        {"stride": AllowedValues((1,), "contrast normalisation has a value for each pixel")},
    ),
    "LocalContrastNormLayer": _norm({"stride": AllowedValues((1,), "there is a value for each pixel")}),
    "CrossMapResponseNormLayer": _norm(),
    "CrossMapPoolingLayer": _layer(
        ("nofm", *_WEIGHTS), _IMAGE, True,
        {
            "brule_init": "the layer has no bias",
            "batch_norm": "neon's CrossMapPoolingLayer does not apply it",
        },
    ),
    "DropOutLayer": _layer(("keep",), _SAMPLE, False, _NO_WEIGHTS | {"activation": "neon's DropOutLayer applies none"}),
    "ActivationLayer": _layer(("activation",), _SAMPLE, False, _NO_WEIGHTS),
    "SliceLayer": _layer(("end_idx",), _SAMPLE, False, _NO_WEIGHTS | {"activation": "neon's SliceLayer applies none"}),
    **same(
        "BranchLayer ListLayer",
        _layer(("sublayers",), _SAMPLE, False, _NO_WEIGHTS, refused={"activation": "set it in the sublayers"}),
    ),
}  # fmt: skip
