"""Entry point of the command `xlogprobs`, which needs the extra ``cli``; the commands are in `xlogprobs.commands`."""

import sys

NEEDED = {"typer", "click", "rich"}


def main() -> None:
    """Run the command line, or say in one line what to install."""
    try:
        from xlogprobs.commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in NEEDED:
            raise
        print(f'xlogprobs: the command line needs {missing}: pip install "xlogprobs[cli]"', file=sys.stderr)
        sys.exit(1)
    app(prog_name="xlogprobs")
