"""What Ray's processes are told on one machine, in tests and in the benchmark. Imports no Ray."""

from pathlib import Path

ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
