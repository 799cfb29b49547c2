"""The pipeline for spark-submit, with the options of `tidegate pipeline run`:

    spark-submit --master spark://host:7077 deploy/pipeline.py --data /shared/tidegate

Tidegate must be installed for the Python of the driver and of every worker (`spark.pyspark.python`), and all of them
must see the data folder and the lake under the same path.
"""

import sys

from tidegate.cli import tidegate

tidegate(["pipeline", "run", *sys.argv[1:]], prog_name="tidegate")
