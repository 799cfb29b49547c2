"""Sessions of Spark as the commands start them."""

from __future__ import annotations

import subprocess
import sys


def test_the_java_of_a_command_lets_others_go_before_it() -> None:
    """With all the threads that it starts later."""
    code = """
import os
from pathlib import Path
from tidegate.pipeline.spark import NICENESS, spark_session, step_back

spark = spark_session("test", {"spark.master": "local[1]"})
step_back(spark)
spark.range(10).count()
tasks = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/task")
found = {os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in tasks.iterdir()}
print(found == {NICENESS}, os.getpriority(os.PRIO_PROCESS, 0))
spark.stop()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "0"], done.stderr[-2000:]
