"""The decision on every key of every neon class: each is read, checked, without effect, or an error.

Reading order: `decisions`, `tables` and `layer_tables` (the decisions), `check` (applies them), `pages` (the guide).
"""
