"""Which metrics the report shows, together with which, and how they are written."""

from collections.abc import Callable
from dataclasses import dataclass

from graphpo_agent.report.numbers import compact

__all__ = ["PANELS", "Panel"]


def _share(value: float) -> str:
    return f"{compact(100 * value)}%"


def _seconds(value: float) -> str:
    return f"{compact(value)} s"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: metrics that share a unit.

    Attributes:
        section: the heading it stands under.
        title: what is shown.
        hint: what it means, in one line.
        metrics: (metric, name of its line) pairs.
        write: how values are written.
        noisy: whether a moving mean helps the eye.
        band_of: the metric that has a confidence band; empty for none.
        standard_error: the metric that holds the band's standard error.
    """

    section: str
    title: str
    hint: str
    metrics: tuple[tuple[str, str], ...]
    write: Callable[[float], str] = compact
    noisy: bool = True
    band_of: str = ""
    standard_error: str = ""


PANELS = (
    Panel(
        "Learning",
        "Held-out accuracy",
        "tasks never trained on; the band is a 95% interval over tasks",
        (("eval/accuracy", "sampled"), ("eval/greedy_accuracy", "greedy")),
        _share,
        noisy=False,
        band_of="eval/accuracy",
        standard_error="eval/standard_error",
    ),
    Panel(
        "Learning",
        "Reward in training",
        "mean over finished paths",
        (("reward/mean", "reward"),),
        _share,
    ),
    Panel(
        "Learning",
        "Prompts with mixed rewards",
        "some paths right, some wrong: where there is something to learn",
        (("reward/mixed_prompts", "mixed"),),
        _share,
    ),
    Panel(
        "Rollouts",
        "Response length",
        "tokens after the prompt per finished path",
        (("rollout/response_tokens", "tokens"),),
    ),
    Panel(
        "Rollouts",
        "Edges per path",
        "turns or segments until the end",
        (("rollout/turns", "edges"),),
    ),
    Panel(
        "Rollouts",
        "Merge rate",
        "nodes whose state another path reached too",
        (("rollout/merge_rate", "merged"),),
        _share,
    ),
    Panel("Rollouts", "Nodes per graph", "the root included", (("rollout/nodes", "nodes"),)),
    Panel(
        "Rollouts",
        "What became of the edges",
        "share of all edges",
        (
            ("rollout/status/ok", "went on"),
            ("rollout/status/answered", "answered"),
            ("rollout/status/invalid_action", "invalid action"),
            ("rollout/status/tool_error", "tool error"),
            ("rollout/status/tool_outage", "tool outage"),
            ("rollout/status/out_of_length", "out of length"),
            ("rollout/status/out_of_turns", "out of turns"),
            ("rollout/status/out_of_budget", "out of budget"),
        ),
        _share,
    ),
    Panel(
        "Rollouts",
        "Continuations",
        "saved on redundant states, and spent again elsewhere",
        (("budget/saved", "saved"), ("budget/reallocated", "reallocated")),
    ),
    Panel(
        "Credit and update",
        "Edges with credit",
        "share of edges whose advantage is not 0, or has no score to come from",
        (
            ("credit/nonzero", "any advantage"),
            ("credit/efficiency_nonzero", "efficiency advantage"),
            ("credit/unscored", "unscored"),
        ),
        _share,
    ),
    Panel("Credit and update", "Entropy", "nats per token", (("update/entropy", "entropy"),)),
    Panel(
        "Credit and update",
        "Clip fraction",
        "tokens whose probability ratio was clipped",
        (("update/clip_fraction", "clipped"),),
        _share,
    ),
    Panel("Credit and update", "Gradient norm", "before clipping", (("update/grad_norm", "norm"),)),
    Panel(
        "Credit and update",
        "Mismatch",
        "between the log-probabilities of sampler and trainer",
        (("update/mismatch", "mismatch"),),
    ),
    Panel(
        "Credit and update",
        "Divergence from the sampler",
        "nats per token",
        (("update/kl", "KL"),),
    ),
    Panel("Credit and update", "Loss", "", (("update/loss", "loss"),)),
    Panel(
        "Credit and update",
        "Learning rate",
        "",
        (("update/learning_rate", "rate"),),
        noisy=False,
    ),
    Panel(
        "Cost",
        "Tokens per second",
        "generated, over sampling and update together",
        (("tokens/per_second", "tokens/s"),),
    ),
    Panel(
        "Cost",
        "Tokens per step",
        "by what they were spent on",
        (
            ("tokens/generated", "generated"),
            ("tokens/prefilled", "prefilled"),
            ("tokens/summary", "summaries"),
        ),
    ),
    Panel(
        "Cost",
        "Time per step",
        "by stage",
        (
            ("time/rollout", "rollout"),
            ("time/update", "update"),
            ("time/eval", "evaluation"),
        ),
        _seconds,
    ),
    Panel("Cost", "Tool calls per step", "", (("tokens/tool_calls", "calls"),)),
)
