"""How good a policy is, and what a grader says of transcripts."""

GRADERS = (
    "em",
    "subem",
    "f1",
    "search_r1_em",
    "search_r1_em_format",
    "tree_grpo_f1",
    "verl_search_r1_em",
    "asearcher",
    "judge",
    "browsecomp",
    "webwalker",
    "xbench",
    "gaia",
    "math",
    "math_dapo",
    "gpqa",
    "code",
)
"""What ``graphpo grade`` can run (``graphpo_agent.evals.graders``)."""
