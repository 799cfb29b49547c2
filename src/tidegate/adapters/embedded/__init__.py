"""The commit log on this machine's disk, or in its memory."""
