"""The `tacit` command with the commands of this package, from a source tree without installation.

Run it as `python -m tacit_paper`.
"""

from tacit.cli import build_app
from tacit_paper.commands import add_commands

if __name__ == "__main__":
    build_app([add_commands])()
