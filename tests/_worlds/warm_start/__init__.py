"""Python processes that start with torch already imported.

Importing torch takes 2.3 s of a core, and making the first optimizer 2 s more (it imports torch's compiler); the tests
start hundreds of ranks. So two servers import both once (`server.py`), and a Python process of a test's job does not
go on by itself (`at_start/sitecustomize.py`): it lets a server fork, and the fork becomes what it would have been
(`rebirth.py`), with its arguments, environment, directory, files and signals. The launcher sees the process that it
started, which passes signals on and ends as the fork ends.

Two servers, because ranks must not be too much alike: those of even and those of odd number order sets differently.
`TORCHMN_TEST_WARM_START=0` starts every process from nothing, as tests/cli does where it is about processes.
"""
