"""A program of a user, which type checkers accept in their strictest mode: `make check` runs them."""
