"""`python -m memd_alerts render`: the rule file as Prometheus reads it, without a daemon."""

import argparse
import sys
from pathlib import Path

from memd_alerts.promql import render
from memd_alerts.rules import RULES_FILE, RulesError, load_rules

DEFAULT_RUNBOOKS = "docs/runbooks"


def main() -> int:
    """Entry point. Returns 0, or 1 when the rule file is wrong."""
    parser = argparse.ArgumentParser(prog="python -m memd_alerts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("render", help="write Prometheus's rules to stdout")
    command.add_argument("--rules", type=Path, default=RULES_FILE, help="default: the shipped ones")
    command.add_argument("--runbooks", default=DEFAULT_RUNBOOKS, help="put before /NAME.md")
    arguments = parser.parse_args()
    try:
        rules = load_rules(arguments.rules)
    except RulesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(render(rules, arguments.runbooks.rstrip("/")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
