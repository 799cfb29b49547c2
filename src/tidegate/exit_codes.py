"""What a command ends with when it fails, and what a watcher may conclude from it. 0 is: it did what it was told."""

from __future__ import annotations

FAILED = 1  # something went wrong, or somebody said no; another try may go well
REFUSED = 2  # what it was given cannot work: configuration, address, folder. Another try would end the same way
