"""Start of the `tacit` command, also as `python -m tacit`."""

import sys
from pathlib import Path


def main() -> None:
    """Run the `tacit` command; without typer and rich, say how to install them."""
    try:
        from tacit.cli import build_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit("tacit: the command needs typer and rich: pip install 'tacit[cli]'")
    sys.path.insert(0, str(Path.cwd()))  # `tacit estimate` imports the user's module from here
    build_app()()


if __name__ == "__main__":
    main()
