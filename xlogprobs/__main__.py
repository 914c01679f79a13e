"""`python -m xlogprobs`, the same as the command `xlogprobs`."""

from xlogprobs.cli import main

if __name__ == "__main__":
    main()
