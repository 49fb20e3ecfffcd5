"""What a launcher sets in the environment of a rank, and where ranks run."""
