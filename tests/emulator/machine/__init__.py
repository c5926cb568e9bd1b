"""The machine: memory, warps, schedules, races."""
