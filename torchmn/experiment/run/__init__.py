"""An experiment on the ranks of a communicator: session, trainer, evaluation."""
