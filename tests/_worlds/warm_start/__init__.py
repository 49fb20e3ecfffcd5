"""Python processes that start with torch already imported.

Importing torch takes 2.3 s of a core, and making the first optimizer 2 s more (it imports torch's compiler); the tests
start hundreds of ranks. So two servers import both once (`server.py`). A Python process of a test's job asks a server
to fork when it starts (`at_start/sitecustomize.py`), and the fork takes its place (`rebirth.py`): arguments,
environment, directory, open files and signals. The launcher sees the process that it started, which passes signals on
and ends as the fork ends.

There are two servers so that ranks differ: those with even and with odd numbers iterate over sets in different orders.
`TORCHMN_TEST_WARM_START=0` starts every process afresh, as tests/cli does for tests about processes.
"""
