"""A Ray cluster that runs already; ``test_launch.py`` starts it as a program.

    python -m tests.engines.verl.ray_cluster

It prints its address and ends with its input.
"""

import sys

import ray

if __name__ == "__main__":
    print(
        ray.init(address="local", num_cpus=4, include_dashboard=False).address_info["gcs_address"]
    )
    sys.stdout.flush()
    sys.stdin.read()
