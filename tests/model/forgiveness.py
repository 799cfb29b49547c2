"""What the broker is known to do wrong, and the comparison overlooks: nothing.

A fault that is found and cannot be mended at once gets a name here and an example in `test_known_faults.py`; when the
broker is right, its line goes.
"""

from __future__ import annotations

TODAY: frozenset[str] = frozenset()
