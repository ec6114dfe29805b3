"""A process reward model for a toy world: learned from how the base policy's own answers ended.

Each step of an answer is labelled with the reward of the whole answer, so that what a model learns
to say of the beginning of an answer is how often such answers are right (the Monte-Carlo labels of
Math-Shepherd, with one continuation each). It is saved in the layout of ``PrefixScorer``.
"""

import shutil
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.graph.jsonl import read_graphs

__all__ = ["train_step_scorer"]

STEPS = 400
BATCH = 32
LEARNING_RATE = 1e-3

Example = tuple[list[int], list[int], float]
"""Token ids of a question and an answer, the last token of each step, the reward."""


def train_step_scorer(policy: Path, tasks: Path, graphs: Path, out: Path) -> float:
    """Train the policy's layers and a linear head on graphs; whole or not at all.

    Args:
        policy: a Hugging Face directory.
        tasks: of the graphs.
        graphs: answers of the policy, judged.
        out: receives the model.

    Returns:
        Mean cross-entropy of the last 50 steps, nats.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    examples = list(_examples(tokenizer, tasks, graphs))
    model = AutoModel.from_pretrained(policy, dtype=torch.float32).train()
    head = nn.Linear(model.config.hidden_size, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses: list[float] = []
    for _ in range(STEPS):
        chosen = torch.randint(len(examples), (BATCH,)).tolist()
        loss = _loss(model, head, [examples[i] for i in chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.eval().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    torch.save(head.state_dict(), partial / "reward_head.pt")
    partial.rename(out)
    return sum(losses[-50:]) / 50


def _examples(tokenizer: PreTrainedTokenizerBase, tasks: Path, graphs: Path) -> Iterator[Example]:
    """One per finished answer, read as ``PrefixScorer`` reads it."""
    questions = {task.id: task.question for task in load_tasks(tasks)}
    for graph in read_graphs(graphs):
        for leaf in graph.terminals.tolist():
            pieces = [questions[graph.id]]
            for v in graph.path(leaf):
                span = graph.span(v)
                own = graph.token_ids[span][graph.loss_mask[span]].tolist()
                pieces.append(str(tokenizer.decode(own, skip_special_tokens=True)))
            encoded = tokenizer("".join(pieces), return_offsets_mapping=True)
            ends = [end for _, end in encoded["offset_mapping"]]
            places = [
                max((i for i, end in enumerate(ends) if end <= boundary), default=0)
                for boundary in list(accumulate(map(len, pieces)))[1:]
            ]
            yield encoded["input_ids"], places, float(graph.reward[leaf])


def _loss(model: nn.Module, head: nn.Linear, batch: list[Example]) -> torch.Tensor:
    """Cross-entropy of the rewards at the ends of all steps."""
    longest = max(len(ids) for ids, _, _ in batch)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _, _ in batch])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    rows = [i for i, (_, places, _) in enumerate(batch) for _ in places]
    ends = [place for _, places, _ in batch for place in places]
    wanted = torch.tensor([reward for _, places, reward in batch for _ in places])
    found = head(hidden[rows, ends])[:, 0]
    return nn.functional.binary_cross_entropy_with_logits(found, wanted)
