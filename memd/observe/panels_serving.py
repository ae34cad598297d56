"""Rows of the Grafana dashboard about requests, the GPU and the daemon."""

from memd.observe.expressions import increase, mean, quantile, rate, ratio, series, total
from memd.observe.panel import Panel, Query, Row, area, chart, heat, quantiles, share, stat

_FAILED = rate("memd_requests_total", outcome="~error|timeout|overloaded")
_COUNTED = rate("memd_requests_total", outcome="!~invalid|unauthorized|cancelled")
# 0 for ready, 1 for what is on the way, 2 for failed.
_STATE = " or ".join(
    f"{value} * ({series('memd_state', state=state)} == 1)"
    for value, state in enumerate(("ready", "!~ready|failed", "failed"))
)

GLANCE = Row(
    "At a glance",
    6,
    (
        Panel(
            "State",
            "stat",
            "none",
            (Query(_STATE, "{{state}}"),),
            "What the daemon does: green when ready, red when it has failed, else orange",
            warn=1,
            bad=2,
        ),
        stat(
            "Memory that cannot be evicted",
            "percentunit",
            "Share of the pool that eviction cannot take: in use or pinned",
            f"max({series('memd_pool_active_ratio')})",
            warn=0.85,
            bad=0.95,
        ),
        Panel(
            "Prefix hit ratio",
            "stat",
            "percentunit",
            (
                Query(
                    ratio(
                        rate("memd_prefix_hit_tokens_total"), rate("memd_prefix_query_tokens_total")
                    )
                ),
            ),
            "Prompt tokens found in the cache, of those looked up",
        ),
        stat(
            "First token, p95",
            "s",
            "From a request's arrival to its first token",
            quantile(0.95, "memd_time_to_first_token_seconds"),
            warn=2,
            bad=5,
        ),
        stat(
            "Failed requests",
            "percentunit",
            "Errors, timeouts and refusals, of all that could be served",
            ratio(_FAILED, _COUNTED),
            warn=0.01,
            bad=0.05,
        ),
        stat(
            "Alerts firing",
            "short",
            "In the daemon's own evaluation",
            total("memd_alerts_firing", by="severity"),
            "{{severity}}",
            warn=1,
            bad=1,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    3,
    (
        chart("First token", "s", "", *quantiles("memd_time_to_first_token_seconds")),
        chart("Between tokens", "s", "", *quantiles("memd_inter_token_latency_seconds")),
        heat("Whole requests", "", "memd_request_duration_seconds"),
        chart(
            "Waiting, mean of a request",
            "s",
            "To start, and for memory by cause",
            (mean("memd_queue_duration_seconds"), "to start"),
            (
                f"{rate('memd_kv_stall_seconds_sum', by='cause')} / ignoring(cause) group_left() "
                f"{rate('memd_queue_duration_seconds_count')}",
                "for memory: {{cause}}",
            ),
        ),
        chart(
            "Step time, p95",
            "s",
            "",
            (quantile(0.95, "memd_engine_step_seconds", by="mode"), "{{mode}}"),
        ),
        share(
            "Steps from CUDA graphs",
            "0 % on a CPU, and where graphs did not fit",
            (
                ratio(
                    rate("memd_engine_steps_total", graph="replayed"),
                    rate("memd_engine_steps_total"),
                ),
                "replayed",
            ),
        ),
    ),
)

REQUESTS = Row(
    "Requests and tenants",
    3,
    (
        area(
            "Running and waiting",
            "short",
            "",
            (total("memd_requests_running"), "running"),
            (total("memd_requests_waiting", by="reason"), "waiting: {{reason}}"),
        ),
        area(
            "Requests by outcome",
            "reqps",
            "",
            (rate("memd_requests_total", by="outcome"), "{{outcome}}"),
        ),
        chart(
            "Tokens",
            "ops",
            "A second",
            (rate("memd_prompt_tokens_total", by="source"), "prompt: {{source}}"),
            (rate("memd_generated_tokens_total"), "generated"),
        ),
        chart(
            "Preemptions and recomputed tokens",
            "ops",
            "Both are work lost to a lack of memory",
            (rate("memd_preemptions_total"), "preemptions"),
            (rate("memd_recomputed_tokens_total"), "recomputed tokens"),
        ),
        area(
            "Pages by tenant",
            "short",
            "",
            (total("memd_tenant_used_pages", by="tenant"), "{{tenant}}"),
        ),
        area(
            "Tokens computed by tenant",
            "ops",
            "",
            (rate("memd_tenant_computed_tokens_total", by="tenant"), "{{tenant}}"),
        ),
    ),
)

GPUS = Row(
    "GPU",
    3,
    (
        area(
            "Board memory by owner",
            "bytes",
            "The upper edge is the board's total",
            (total("memd_gpu_memory_bytes", by="owner"), "{{owner}}"),
        ),
        share("Utilisation", "", (series("memd_gpu_utilization_ratio"), "busy")),
        chart(
            "Power",
            "watt",
            "",
            (series("memd_gpu_power_watts"), "drawn"),
            (series("memd_gpu_power_limit_watts"), "limit"),
        ),
        chart("Temperature", "celsius", "", (series("memd_gpu_temperature_celsius"), "{{sensor}}")),
        share(
            "Time throttled",
            "",
            (rate("memd_gpu_throttled_seconds_total", by="reason"), "{{reason}}"),
        ),
        chart(
            "Errors",
            "short",
            "ECC and Xid errors, and NVML calls that failed",
            (increase("memd_gpu_ecc_errors_total", by="kind"), "ECC {{kind}}"),
            (increase("memd_gpu_xid_errors_total", by="xid"), "Xid {{xid}}"),
            (increase("memd_gpu_poll_failures_total"), "NVML failures"),
        ),
        chart(
            "PCIe and NVLink",
            "Bps",
            "",
            (rate("memd_gpu_pcie_bytes_total", by="direction"), "PCIe {{direction}}"),
            (rate("memd_gpu_nvlink_bytes_total", by="direction"), "NVLink {{direction}}"),
        ),
    ),
)

DAEMON = Row(
    "Daemon",
    3,
    (
        chart("Settings in force", "short", "", (series("memd_setting"), "{{key}}")),
        chart(
            "Setting changes",
            "short",
            "",
            (
                f"{increase('memd_setting_changes_total', by='key, source, outcome')} > 0",
                "{{key}} by {{source}}: {{outcome}}",
            ),
        ),
        chart(
            "Leaked pages",
            "short",
            "Found by the last audit; must be 0",
            (series("memd_leaked_pages"), "leaked"),
        ),
        chart(
            "Rows for the database",
            "ops",
            "",
            (rate("memd_history_rows_total", by="outcome"), "{{outcome}}"),
            (series("memd_history_queue_rows"), "waiting"),
        ),
        chart(
            "Jobs",
            "ops",
            "",
            (rate("memd_job_runs_total", by="job_name, outcome"), "{{job_name}}: {{outcome}}"),
        ),
        chart(
            "Notifications",
            "short",
            "",
            (
                increase("memd_notifications_total", by="channel, outcome"),
                "{{channel}}: {{outcome}}",
            ),
        ),
        chart(
            "Engine restarts, and log lines from warnings up",
            "short",
            "",
            (increase("memd_engine_restarts_total", by="reason"), "restart: {{reason}}"),
            (
                increase("memd_log_messages_total", by="level", level="~warning|error|critical"),
                "log: {{level}}",
            ),
        ),
    ),
)
