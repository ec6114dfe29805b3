"""A Ray cluster that runs already, of two nodes; ``conftest.py`` starts it as a program.

    python -m tests.engines.verl.ray_cluster

It prints its address and ends with its input.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 32, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
