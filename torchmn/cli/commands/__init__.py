"""The commands of torchmn, one file each."""
