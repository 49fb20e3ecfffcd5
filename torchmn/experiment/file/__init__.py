"""YAML documents, their fields and places; no vocabulary."""
