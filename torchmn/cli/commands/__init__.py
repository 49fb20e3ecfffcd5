"""The sub-commands of `torchmn`, one file each, and the options that commands on experiment files share."""
