"""Gives every test under tests/ the worlds of ranks: `@ranks(n)` and the `comm` argument."""

from hypothesis import HealthCheck, settings

from tests._worlds.plugin import (  # noqa: F401  (pytest finds hooks and fixtures by their names here)
    comm,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    pytest_xdist_make_scheduler,
)

# What hypothesis finds slow may be a busy machine.
settings.register_profile("torchmn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("torchmn")
