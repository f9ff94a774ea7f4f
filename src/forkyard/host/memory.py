"""How much memory the host has."""

from __future__ import annotations


def memory_mb() -> tuple[float, float]:
    """The host's total and available memory, in MiB."""
    total = available = 0.0
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                total = int(line.split()[1]) / 1024
            elif line.startswith("MemAvailable:"):
                available = int(line.split()[1]) / 1024
                break
    return total, available
