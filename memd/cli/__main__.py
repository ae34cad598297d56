"""`python -m memd.cli`, for where the script is not on the path."""

from memd.cli import main

main()
