"""Prometheus's rules as the Prometheus operator takes them: a PrometheusRule of Kubernetes."""

from textwrap import indent

_HEAD = """\
# Written by `memd alerts render --kubernetes`; a test keeps it true.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: memd
spec:
"""


def prometheus_rule(rules: str) -> str:
    """The same rules, wrapped.

    Args:
        rules: A rule file of Prometheus, as `memd_alerts.promql.render` writes it.
    """
    body = "".join(line for line in rules.splitlines(keepends=True) if not line.startswith("#"))
    return _HEAD + indent(body, "  ")
