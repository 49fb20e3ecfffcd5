"""Who talks to whom, and over what: one contract (`base`), four transports."""
