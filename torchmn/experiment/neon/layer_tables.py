"""The decision on every key of neon's layers, for `tables`."""

from __future__ import annotations

from collections.abc import Mapping

from torchmn.experiment.neon.keys import Keys, Only

FLOAT32 = Only(
    ("np.float32", "float32", "numpy.float32"),
    "numbers are float32 here, or float64 with `dtype: float64` in our format",
)
BACKEND = {"backend": "PyTorch computes, on the device of each rank"}
NAME = {"name": "a label in neon's logs"}
MEMORY = "how neon used its memory"


def same(names: str, keys: Keys) -> dict[str, Keys]:
    return dict.fromkeys(names.split(), keys)


def dtypes(*names: str) -> dict[str, Only]:
    return dict.fromkeys(("backend_type", *names), FLOAT32)


_LAYER_MEANINGLESS = (
    BACKEND
    | NAME
    | {
        "pos": "the place of a layer is that in the list",
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
_RULE = ("learning_rule", "lrule_init")
_WEIGHTS = ("weight_init", *_RULE, "activation")
_NO_WEIGHTS: dict[str, str] = dict.fromkeys(
    ("weight_init", *_RULE, "brule_init", "batch_norm"), "the layer has no weights"
)


def _layer(
    read: tuple[str, ...], checked: tuple[str, ...], local: bool, meaningless: dict[str, str] | None = None,
    only: Mapping[str, Only] | None = None, refused: Mapping[str, str] | None = None,
) -> Keys:  # fmt: skip
    shape = Only((local,), "whether a layer is local follows from its class")
    return Keys(
        read,
        checked,
        {**_LAYER_ONLY, "is_local": shape, **(only or {})},
        _LAYER_MEANINGLESS | (meaningless or {}),
        refused or {},
    )


_NONE_APPLIED = {"activation": "neon's pooling and normalising layers apply none"}
_POOL = {
    "read": ("fshape", "stride", "pad"),
    "checked": (*_IMAGE, "nfm", "nofm"),
    "local": True,
    "meaningless": _NO_WEIGHTS | _NONE_APPLIED,
    "only": {"maxout": Only((1,), "maxima over maps are not supported")},
}
_NORM = {"checked": _IMAGE, "local": True, "meaningless": _NO_WEIGHTS | _NONE_APPLIED}
_OF_DATA = {
    "dataset": "a model is trained on the experiment's data set",
    "has_labels": "labels are the numbers of classes here",
}
LAYERS = {
    **same(
        "DataLayer ImageDataLayer",
        Keys((), ("is_local", "nout", "nofm", "ofmshape", "batch_size"), _LAYER_ONLY, _LAYER_MEANINGLESS | _OF_DATA),
    ),
    "CostLayer": Keys(
        ("cost", "ref_label"),
        ("ref_layer", "batch_size", "nin"),
        {**_LAYER_ONLY, "category_label": Only(("l_id",), "samples have one label each")},
        _LAYER_MEANINGLESS | {"raw_label": "labels are the numbers of classes here"},
    ),
    **same(
        "FCLayer Layer LayerWithNoBias",
        _layer(("nout", *_WEIGHTS, "batch_norm"), (*_SAMPLE, "brule_init"), False),
    ),
    "ConvLayer": _layer(
        ("nofm", "fshape", "stride", "pad", "local_conv", *_WEIGHTS, "batch_norm"),
        (*_IMAGE, "brule_init", "shared_bias"),
        True,
    ),
    "LocalFilteringLayer": _layer(
        ("nofm", "fshape", "stride", *_WEIGHTS, "sparsity", "tied_weights"),
        _IMAGE,
        True,
        meaningless={"pretraining": "the model says whether it is pretrained", "brule_init": "the layer has no bias"},
        refused={"batch_norm": "use ConvLayer with `local_conv: True`"},
    ),
    "PoolingLayer": _layer(**{**_POOL, "read": ("op", *_POOL["read"])}),  # type: ignore[arg-type]
    **same("MaxPoolingLayer L2PoolingLayer AveragePoolingLayer", _layer(**_POOL)),  # type: ignore[arg-type]
    "LCNLayer": _layer(
        ("fshape",), (*_IMAGE, "nfm", "nofm"), True, _NO_WEIGHTS | _NONE_APPLIED,
        {"stride": Only((1,), "contrast normalisation has a value for each pixel")},
    ),
    "LocalContrastNormLayer": _layer(
        ("ksize", "alpha", "beta"), only={"stride": Only((1,), "there is a value for each pixel")}, **_NORM  # type: ignore[arg-type]
    ),
    "CrossMapResponseNormLayer": _layer(("ksize", "alpha", "beta"), **_NORM),  # type: ignore[arg-type]
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
        _layer(("sublayers",), ("batch_size",), False, _NO_WEIGHTS, refused={"activation": "say it in the sublayers"}),
    ),
}  # fmt: skip
