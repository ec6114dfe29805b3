"""A Ray cluster that runs already; ``test_launch.py`` starts it as a program.

    python -m tests.engines.verl.ray_cluster

It prints its address and ends with its input.
"""

import sys

import ray

if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
