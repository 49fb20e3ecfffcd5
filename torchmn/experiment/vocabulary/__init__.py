"""The words of an experiment file: schema, layers, costs, optimizers, data sets, metrics."""
