"""The names that an experiment file may use: layers, costs, optimizers, data sets, metrics, and the file's schema."""
