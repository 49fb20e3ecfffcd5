"""Runs an experiment on the ranks of a communicator: model, session, trainer, evaluation, run directory."""
