"""Script that runs the `torchmn` command in processes that TorchMN itself starts: `python start.py train ...`.

`python -m torchmn.cli.main` would put the working directory first on sys.path, where a user's wave.py would shadow
the standard module of that name.
"""

import sys

START = __file__
"""The path of this script."""

if __name__ == "__main__":
    import os.path  # already imported by Python itself, so no file on sys.path can shadow it

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [directory for directory in sys.path if directory != here]  # Python puts a script's directory first
    sys.path.append(os.path.dirname(os.path.dirname(here)))  # for a TorchMN that is not installed

    from torchmn.cli.main import main

    sys.exit(main())
