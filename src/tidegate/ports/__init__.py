"""What the core asks of the world, as Protocol classes that adapters implement.

Ports speak in batches and complete by call back, never per message: a group commit on one disk and a quorum of
replicas have the same shape. May import: `log` (the record types), `errors`.
"""
