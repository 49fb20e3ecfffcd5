"""The watchdog: records what each rank waits for, and ends a job that cannot continue with a table of all ranks."""
