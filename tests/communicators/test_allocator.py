"""malloc keeps freed memory, unless the user or another allocator decides otherwise."""

from __future__ import annotations

import platform

import pytest

from torchmn.communicators.launchers.allocator import keep_freed_memory


@pytest.mark.parametrize(
    "environment",
    [{"TORCHMN_MALLOC": "0"}, {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}, {"MALLOC_TRIM_THRESHOLD_": "100000"}],
)
def test_a_choice_of_the_user_is_left_alone(environment: dict[str, str]) -> None:
    assert not keep_freed_memory(environment)


def test_glibc_takes_all_settings_and_takes_them_twice() -> None:
    done = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory({}) is done
    assert keep_freed_memory({}) is done
