"""Entry point of the `sdsa` command and of ``python -m sdsa_cli``."""

from .app import app


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    app(prog_name="sdsa")


if __name__ == "__main__":
    main()
