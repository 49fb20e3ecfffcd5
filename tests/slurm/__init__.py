"""What users do under Slurm, on a cluster that `make test-slurm` starts on this machine (tools/slurm.py)."""
