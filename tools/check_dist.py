"""Checks a wheel and a source distribution: `python tools/check_dist.py dist`. `make dist` runs it.

Both must have every file of torchmn/ that git has, and their description no relative links.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    directory = Path(sys.argv[1])
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    tracked = subprocess.run(["git", "ls-files", "torchmn"], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = set(tracked.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        description = archive.read(metadata).decode()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    problems = [f"{wheel.name} lacks {name}" for name in sorted(expected - names)]
    problems += [f"{sdist.name} lacks {name}" for name in sorted({*expected, "README.md", "LICENSE"} - in_sdist)]
    problems += [f"{wheel.name} has {name}" for name in sorted(names) if not name.startswith("torchmn")]
    problems += [f"relative link in the description: {link}" for link in relative_links(description)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{wheel.name} and {sdist.name} have all {len(expected)} files of torchmn/")


def relative_links(markdown: str) -> list[str]:
    """Returns the targets of links and images that are no addresses."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", markdown) if not re.match(r"https?:|#", link)]


if __name__ == "__main__":
    main()
