"""What the commands that read an experiment file share: options, and starting ranks."""
