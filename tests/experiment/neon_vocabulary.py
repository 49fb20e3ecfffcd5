"""The classes and keys of 108 experiment files of neon, from 2014 to 2015."""

from __future__ import annotations

CLASSES: dict[str, str] = {
    "AELayer": "name backend batch_size pos learning_rule nin nout activation weight_init",
    "AdaDelta": "name lr_params",
    "AutoUniformValGen": "relu bias_init islocal scale",
    "Autoencoder": "backend num_epochs batch_size cost serialized_path layers",
    "AveragePoolingLayer": "name backend batch_size pos nifm ifmshape fshape stride",
    "Balance": "num_epochs batch_size layers classlayers stylelayers zidx",
    "BranchLayer": "name sublayers",
    "CIFAR10": "backend repo_path sample_pct serialized_path dist_flag dist_mode",
    "CPU": "rng_seed seterr_handling",
    "CPUDataDist": "rng_seed seterr_handling",
    "ConvLayer": (
        "name backend batch_size pos learning_rule nifm nofm ifmshape fshape stride weight_init backend_type "
        "batch_norm lrule_init brule_init pad activation local_conv"
    ),
    "ConvLayerDist": "name backend batch_size pos learning_rule nifm nofm ifmshape fshape stride weight_init",
    "ConvnetDist": "backend num_epochs batch_size cost layers learning_rate dataset",
    "CostLayer": "name ref_layer cost ref_label raw_label",
    "CrossEntropy": "backend_type epsilon scale olayer shortcut_deriv backend batch_size use_binary",
    "CrossMapPoolingLayer": (
        "name backend activation batch_size pos learning_rule nifm nofm ifmshape weight_init lrule_init"
    ),
    "CrossMapResponseNormLayer": "name ksize alpha beta backend batch_size pos ifmshape nifm",
    "Cudamat": "rng_seed",
    "DBN": "backend num_epochs batch_size learning_rate momentum cost serialized_path layers",
    "DataLayer": "name nout is_local nofm ofmshape dataset",
    "DropOutLayer": "name backend_type keep backend batch_size pos nin",
    "FCLayer": "name nout lrule_init weight_init activation backend_type batch_norm brule_init backend pos nin",
    "FitExperiment": "backend datasets model logging dataset weight_inits lrule",
    "FitPredictErrorExperiment": (
        "backend datasets model logging dist_flag dataset metrics weight_init lrule diagnostics weight_inits "
        "inference_sets lrules predictions wt_cfgs wp ww"
    ),
    "FixedPoint": "rng_seed seterr_handling default_dtype",
    "Flexpoint": "rng_seed seterr_handling default_dtype",
    "GB": (
        "backend num_epochs num_pretrain_epochs num_initial_epochs batch_size pretraining visualize spot_check "
        "pretrain_cost cost layers"
    ),
    "GBDist": (
        "backend num_epochs num_pretrain_epochs num_initial_epochs batch_size pretraining visualize spot_check "
        "pretrain_cost cost layers"
    ),
    "GPU": "rng_seed seterr_handling",
    "GPUDataDist": "rng_seed seterr_handling",
    "GaussianValGen": "scale bias_init loc backend",
    "GenOutputExperiment": "zparam olayout fshape figure_filename dataset lrule wt_cfgs model logging",
    "GradientDescent": "name lr_params",
    "GradientDescentMomentum": "name lr_params param_dtype",
    "GradientDescentPretrain": "name lr_params",
    "Hurricane": "backend repo_path hdf5_file variables training_size test_size",
    "I1K": (
        "load_path repo_path output_image_size cropped_image_size max_tar_file output_batch_size ring_buffer_size "
        "num_train_macro_batches num_val_macro_batches num_processes start_train_batch end_train_batch "
        "start_val_batch end_val_batch"
    ),
    "ImageDataLayer": "name is_local nofm ofmshape",
    "Imageset": (
        "repo_path imageset square_crop save_dir output_image_size cropped_image_size macro_size num_channels "
        "num_workers mean_norm unit_norm ntrain nval backend_type image_dir nclass train_start"
    ),
    "Iris": "backend repo_path sample_pct serialized_path overwrite_list",
    "L2PoolingLayer": "name backend batch_size pos nifm ifmshape fshape stride",
    "L2PoolingLayerDist": "name backend batch_size pos nifm ifmshape fshape stride",
    "LCNLayer": "name backend batch_size pos nifm ifmshape fshape stride",
    "LCNLayerDist": "name backend batch_size pos nifm ifmshape fshape stride",
    "Layer": (
        "name backend batch_size pos learning_rate nin nout activation weight_init weight_dtype velocity_dtype "
        "delta_dtype updates_dtype pre_act_dtype output_dtype learning_rule berror_dtype deltas_dtype"
    ),
    "LayerDist": "name backend batch_size pos learning_rule nin nout activation weight_init",
    "LayerWithNoBias": (
        "name backend batch_size pos learning_rule nin nout activation weight_init weight_dtype delta_dtype "
        "updates_dtype pre_act_dtype output_dtype berror_dtype"
    ),
    "LayerWithNoBiasDist": "name backend batch_size pos learning_rule nin nout activation weight_init",
    "LocalContrastNormLayer": "name alpha beta ksize",
    "LocalFilteringLayer": (
        "name pretraining sparsity backend batch_size pos learning_rule tied_weights nifm nofm ifmshape fshape "
        "stride weight_init"
    ),
    "LocalFilteringLayerDist": (
        "name pretraining sparsity backend batch_size pos learning_rule tied_weights nifm nofm ifmshape fshape "
        "stride weight_init"
    ),
    "MLP": (
        "backend batch_size num_epochs learning_rate momentum cost serialized_path layers temp_dtype dist_mode "
        "backend_type batch_norm step_print overwrite_list reuse_deltas deserialized_path momentum_params dataset"
    ),
    "MLPB": "backend num_epochs batch_size layers serialized_path",
    "MLPDist": "backend num_epochs batch_size learning_rate cost layers momentum serialized_path",
    "MNIST": "backend repo_path sample_pct serialized_path dist_flag dist_mode batch_size num_test_sample",
    "MOBYDICK": "repo_path sample_pct data_dim unrolls backend",
    "MaxPoolingLayer": "name backend batch_size pos nifm ifmshape fshape stride",
    "MaxPoolingLayerDist": "name backend batch_size pos nifm ifmshape fshape stride",
    "MisclassPercentage": "error_rank",
    "NDSB": "backend repo_path sample_pct image_width serialized_path",
    "NRVBackend": "rng_seed seterr_handling default_flex_dtype module_logging_levels use_flex_dtype use_compiler",
    "NodeNormalizedValGen": "scale bias_init backend",
    "NormalValGen": "loc scale",
    "PoolingLayer": "name backend_type op fshape stride maxout",
    "RBM": "backend num_epochs batch_size cost serialized_path layers",
    "RBMLayer": "name backend batch_size pos learning_rule nin nout activation weight_init learning_rate",
    "RNN": "num_epochs batch_size reset_period unrolls make_plots truncate shortcut_deriv layers backend cost",
    "RecurrentCostLayer": "name ref_layer cost",
    "RecurrentHiddenLayer": (
        "name lrule_init nout unrolls activation gate_activation weight_init weight_init_rec backend batch_size "
        "pos learning_rule nin"
    ),
    "RecurrentLSTMLayer": (
        "name lrule_init nout unrolls activation gate_activation weight_init weight_init_rec backend batch_size "
        "pos learning_rule nin"
    ),
    "RecurrentOutputLayer": (
        "name lrule_init nout unrolls activation weight_init backend batch_size pos learning_rule nin"
    ),
    "Softmax": "shortcut_deriv",
    "SparseEigenValGen": "sparseness eigenvalue backend",
    "SumSquaredDiffs": "olayer",
    "ToyImages": "repo_path sample_pct backend_type backend",
    "UniformValGen": "low high bias_init relu backend type",
    "WriteErrorToFile": "filename item dataset weight_init lrule model logging",
    "XCovariance": "blkidx scale",
    "fixpt_dtype": "sign_bit int_bits frac_bits overflow rounding",
    "flexpt_dtype": "sign_bit int_bits frac_bits overflow rounding",
}
"""For each class, the keys that files have."""
MAPPINGS: dict[str, str] = {
    "lr_params": "backend rho epsilon learning_rate schedule momentum_params weight_decay pretrain_learning_rate",
    "momentum_params": "type initial_coef coef start_epoch saturate_epoch saturated_coef",
    "schedule": "type ratio step_epochs",
}
"""The keys of plain mappings in learning rules and models."""
