"""Starting ranks on this machine: which MPI, which command, whose output, and no process left behind."""
