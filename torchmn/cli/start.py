"""Runs the `torchmn` command in a process that TorchMN starts: `python start.py train ...`.

`python -m torchmn.cli.main` would put the working directory in front of Python's own modules, where a file such as
wave.py replaces the one that a library imports.
"""

import sys

START = __file__
"""The path of this script."""

if __name__ == "__main__":
    import os.path  # which Python has imported already

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]  # Python puts a script's directory in front
    sys.path.append(os.path.dirname(os.path.dirname(here)))  # where TorchMN is not installed

    from torchmn.cli.main import main

    sys.exit(main())
