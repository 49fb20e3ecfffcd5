"""The ways to communicators: for the ranks of a launcher, for threads, and torch.distributed's default group."""
