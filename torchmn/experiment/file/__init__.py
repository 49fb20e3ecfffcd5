"""Reading, validating and writing YAML experiment files, independent of the names that a file may use."""
