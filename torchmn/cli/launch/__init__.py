"""Starts the ranks of a job on this machine, relays their output, and ends all of their processes."""
