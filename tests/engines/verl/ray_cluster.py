"""A Ray cluster that runs already, of two nodes; ``test_launch.py`` starts it as a program.

    python -m tests.engines.verl.ray_cluster

It prints its address and ends with its input.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
