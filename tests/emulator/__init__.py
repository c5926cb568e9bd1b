"""A functional emulator of PTX kernels; test code only.

`record` what host code launches, `run` it on several schedules, and read the report; README.md has
an example. `run_kernel` runs PTX text.
"""

from .errors import EmulationError
from .host.emulated_launch import RunReport, run
from .host.launch_recorder import LaunchRecorder, Session, record
from .host.recorded_launch import Device, Launch
from .machine.launch import Report, run_kernel
from .machine.memory import Region

__all__ = [
    "Device",
    "EmulationError",
    "Launch",
    "LaunchRecorder",
    "Region",
    "Report",
    "RunReport",
    "Session",
    "record",
    "run",
    "run_kernel",
]
