"""Which rank waits for which, since when; and what ends a job that cannot continue."""
