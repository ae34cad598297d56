"""Declarations: the daemon itself, its settings, jobs, history and alerts."""

from typing import get_args

from memd.config import LIVE_KEYS
from memd.histogram import JOB
from memd.observe.family import Family
from memd.settings_history import Outcome, Source

STATES = ("loading", "ready", "restarting", "draining", "failed")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
JOB_OUTCOMES = ("ok", "error", "missed", "skipped")
ROW_OUTCOMES = ("written", "dropped")
TRACE_OUTCOMES = ("recorded", "dropped")
SEVERITIES = ("page", "ticket")
NOTIFICATION_OUTCOMES = ("sent", "failed", "suppressed")

_JOBS = {"job_name": "the jobs of the daemon"}  # Prometheus takes `job` for the target
_TABLES = {"table": "the tables of the database"}

DAEMON = (
    Family(
        "memd_build_info",
        "gauge",
        "1; versions in use",
        {"version": "one", "python": "one", "torch": "one", "triton": "one"},
    ),
    Family("memd_state", "gauge", "1 for the state the daemon is in", {"state": STATES}),
    Family(
        "memd_engine_restarts",
        "counter",
        "Restarts of the engine; what the engine itself counts begins at 0 with each",
        {"reason": ("killed", "crashed", "hung")},
    ),
    Family("memd_log_messages", "counter", "Log lines of the api process", {"level": LOG_LEVELS}),
)

SETTINGS = (
    Family(
        "memd_setting",
        "gauge",
        "Value in force of each live setting that is a number, in base units",
        {"key": tuple(sorted(LIVE_KEYS))},
        absent="for the engine's settings: until the engine has reported",
    ),
    Family(
        "memd_setting_changes",
        "counter",
        "Changes of live settings",
        {
            "key": tuple(sorted(LIVE_KEYS)),
            "source": get_args(Source),
            "outcome": get_args(Outcome),
        },
    ),
    Family("memd_settings_revision", "gauge", "Revision of the settings in force"),
    Family(
        "memd_config_last_reload_successful",
        "gauge",
        "1 if the settings file was taken at the last reload, or at the start",
    ),
    Family(
        "memd_config_last_reload_success_timestamp_seconds",
        "gauge",
        "When the settings file was last taken",
    ),
)

OPERATOR = (
    Family(
        "memd_job_runs",
        "counter",
        "Runs of the daemon's jobs",
        {**_JOBS, "outcome": JOB_OUTCOMES},
    ),
    Family("memd_job_duration_seconds", "histogram", "Length of one run", _JOBS, JOB),
    Family(
        "memd_job_last_success_timestamp_seconds",
        "gauge",
        "When a job last ran to its end",
        _JOBS,
        absent="until its first run",
    ),
    Family(
        "memd_history_rows",
        "counter",
        "Rows for the database, by what became of them",
        {**_TABLES, "outcome": ROW_OUTCOMES},
    ),
    Family(
        "memd_trace_requests",
        "counter",
        "Sequences that were to be recorded in a trace; dropped ones are missing in it",
        {"outcome": TRACE_OUTCOMES},
    ),
    Family("memd_history_queue_rows", "gauge", "Rows waiting for the database"),
    Family(
        "memd_history_database_bytes",
        "gauge",
        "Size of the database",
        absent="while the database cannot be read",
    ),
    Family(
        "memd_alerts_firing",
        "gauge",
        "Alerts that fire now in the built-in evaluation",
        {"severity": SEVERITIES},
        absent="where the built-in evaluation is off",
    ),
    Family(
        "memd_notifications",
        "counter",
        "Notifications of alerts, by what became of them",
        {"channel": "the channels set up", "outcome": NOTIFICATION_OUTCOMES},
        absent="where there is no channel",
    ),
)
