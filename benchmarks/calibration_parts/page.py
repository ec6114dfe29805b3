"""The page of ``benchmarks/calibration.py`` above its tables: what came out, what was compared."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from benchmarks.calibration_parts.findings import findings, served_alike
from benchmarks.calibration_parts.frozen import Checks, Training

__all__ = ["about_page"]

_ABOUT = """\
# State descriptions and merge thresholds on kb

{findings}

![merged states, right merges, spread and error over the threshold](calibration-kb.png)

## What was compared

`python benchmarks/calibration.py`; {machine}. A policy is warm-started on the world's
demonstrations; graphs and continuations are of held-out questions. The run's own `state` is the
exact key of the world: the facts of the question that were found, and the answer; it is the
reference. The other choices are in `benchmarks/states_kb.yaml`; all share one set of continuations.

- **Encoder** (`*_encoder`): a BERT of 2 layers and width 96, mean pooling, trained from nothing by
  the script ({encoder_steps} batches) and saved in the layout of E5. A positive pair is two
  renderings of one state of a demonstration: the end of its path (200 or 600 characters), its facts
  in the summariser's form below, these facts in another order. Negatives are the other states of
  the batch, up to four of each of 16 demonstrations. In the last ten batches the right rendering
  was the nearest one in {encoder_right:.0%} of all cases; the end of a path does not say all facts.
- **Frozen summariser** (`frozen_*`): a Qwen2 of 2 layers and width 64, trained from nothing by the
  script ({summarizer_steps} batches, {summarizer_loss:.3f} nats a token in the end) to write the
  facts of a demonstration's state, as `{example}`, when shown the path as `frozen_summary` shows
  it. Of {states} states of demonstrations that were kept back it describes {exact:.1%} without a
  mistake. It answers over HTTP from a vLLM server.
- **Demonstrations** solve training questions, whose entities occur in no held-out question. Their
  facts are read off question and documents by following the chains, so these two models were told
  what matters on this world; they have seen no evaluated graph and no key.
- **Endpoints**: the same encoder in a vLLM server (`frozen_openai`, `/v1/embeddings`) and in a
  server of thirty lines that speaks text-embeddings-inference's `/embed` (`frozen_tei`; the Rust
  server itself was not run: no Python package brings it or speaks its protocol). Their vectors of
  {states} texts differ from the encoder's own by at most {openai:.1g} and {tei:.1g} in a component.
  {served}

The models are small and trained for minutes. The page compares ways to describe a state on this
world; it says nothing about E5 or a 7B summariser on real questions.
"""


def about_page(
    machine: str, training: Mapping[str, Training], checks: Checks, record: Mapping[str, Any]
) -> str:
    """The page above its tables.

    Args:
        machine: what it ran on.
        training: of the frozen models, by name.
        checks: of the servers.
        record: ``calibration.json``.
    """
    choices = record["choices"]
    text = _ABOUT.format(
        findings=findings(choices, record["options"]["tolerance"], record["score_error"]),
        machine=machine,
        encoder_steps=training["encoder"].steps,
        encoder_right=training["encoder"].result,
        summarizer_steps=training["summarizer"].steps,
        summarizer_loss=training["summarizer"].result,
        states=checks.states,
        exact=checks.exact,
        example=checks.example,
        openai=checks.openai_difference,
        tei=checks.tei_difference,
        served=served_alike(choices),
    )
    return "\n\n".join(map(_reflowed, text.split("\n\n"))) + "\n"


def _reflowed(block: str) -> str:
    """A paragraph or a list in lines of at most 100 characters, whatever was put into it."""
    items = re.split(r"\n(?=- )", block)
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            100,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )
