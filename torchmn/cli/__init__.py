"""The `torchmn` command: one file per sub-command, and what they stand on in sub-packages."""
