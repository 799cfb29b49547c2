"""Python runs this first in every process that has this folder on its PYTHONPATH: what tests bring into the real
command from outside. Each part does nothing unless its environment variables are set."""

import allocations
import disk_recorder
import moved_clock

for part in (allocations, disk_recorder, moved_clock):
    part.install()
