"""The commit log on this machine's disk, or in its memory; and the lake that it goes on in."""
