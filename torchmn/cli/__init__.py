"""The `torchmn` command: `commands/` has a file per sub-command, `launch/` starts ranks, `checks/` is for `doctor`."""
