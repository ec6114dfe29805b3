import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen2Model,
)

from graphpo_agent.data.toy_model import make_toy_tokenizer
from graphpo_agent.errors import GraphPOError, ModelError
from graphpo_agent.plain_text import without_control
from graphpo_agent.prm_local import LocalStepScorer, PrefixScorer
from graphpo_agent.prm_text import step_messages
from graphpo_agent.protocols import StepScorer
from graphpo_agent.types import SteppedResponse

WORDS = "two plus two is four . so six ! what"
LONG = SteppedResponse("what is two plus two", ("two plus two", " is four", " .", "so six !" * 3))
RESPONSES = [
    SteppedResponse("what is two", ("two .",)),
    LONG,
    SteppedResponse("what is Ünd", (" is Ü", "", "four ! so")),
    SteppedResponse("no steps", ()),
]


def make_tokenizer(path):
    tokenizer = make_toy_tokenizer([WORDS])
    special = ("<extra_0>", "<s>")
    tokenizer.add_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    tokenizer.save_pretrained(path)
    return tokenizer


def make_config(tokenizer):
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Weights and configuration as Qwen2.5-Math-PRM has them, its code not there."""
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(path)
    backbone = Qwen2Model(make_config(tokenizer))
    backbone.config.save_pretrained(path)
    weights = {f"model.{name}": weight for name, weight in backbone.state_dict().items()}
    weights |= {"score.0.weight": torch.randn(16, 16) / 4, "score.0.bias": torch.randn(16)}
    weights |= {"score.2.weight": torch.randn(2, 16) / 4, "score.2.bias": torch.randn(2)}
    weights["lm_head.weight"] = torch.zeros(len(tokenizer), 16)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    config["auto_map"] = {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def conversation(response):
    """The text of Qwen2.5-Math-PRM's interface in the toy chat template, written out."""
    steps = "".join(step + "<extra_0>" for step in response.steps)
    return (
        f"<|im_start|>user\n{response.question}<|im_end|>\n"
        f"<|im_start|>assistant\n{steps}<|im_end|>\n"
    )


def hidden_states(path, prefix, token_ids):
    """[tokens, 16] of one text by itself, from the weights on disk."""
    model = Qwen2Model(Qwen2Config.from_pretrained(path)).eval()
    weights = load_file(path / "model.safetensors")
    kept = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
    model.load_state_dict({k: w for k, w in kept.items() if not k.startswith(("score", "lm_head"))})
    with torch.no_grad():
        return model(torch.tensor([token_ids])).last_hidden_state[0]


def qwen_scores(path, response):
    """One response by itself: class-1 probability at each step token."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(conversation(response))["input_ids"]
    tag = tokenizer.convert_tokens_to_ids("<extra_0>")
    w = load_file(path / "model.safetensors")
    scores = []
    for token, h in zip(ids, hidden_states(path, "model.", ids), strict=True):
        if token == tag:
            inner = (w["score.0.weight"] @ h + w["score.0.bias"]).clamp(min=0)
            wrong, right = (w["score.2.weight"] @ inner + w["score.2.bias"]).tolist()
            scores.append(1 / (1 + math.exp(wrong - right)))
    return scores


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_are_those_of_qwen_s_layers_at_the_step_tokens(qwen, batch_size):
    scorer = LocalStepScorer(qwen, batch_size=batch_size)
    assert isinstance(scorer, StepScorer)
    got = scorer.score(RESPONSES)
    assert [len(scores) for scores in got] == [1, 4, 3, 0]
    for scores, response in zip(got, RESPONSES, strict=True):
        assert scores == pytest.approx(qwen_scores(qwen, response), abs=1e-5)
    assert len({round(x, 4) for scores in got for x in scores}) == 8
    assert scorer.counts == {"prm/too_long": 0}


def test_a_system_message_is_read_first(qwen):
    (plain,) = LocalStepScorer(qwen).score([LONG])
    (told,) = LocalStepScorer(qwen, system="two is six").score([LONG])
    assert told != pytest.approx(plain, abs=1e-3)


def test_steps_beyond_the_limit_have_no_score(qwen):
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    tag = tokenizer.convert_tokens_to_ids("<extra_0>")
    places = [i for i, x in enumerate(tokenizer(conversation(LONG))["input_ids"]) if x == tag]
    scorer = LocalStepScorer(qwen, max_tokens=places[2])
    (scores,) = scorer.score([LONG])
    assert scores[:2] == pytest.approx(qwen_scores(qwen, LONG)[:2], abs=1e-5)
    assert [math.isnan(x) for x in scores] == [False, False, True, True]
    assert scorer.counts == {"prm/too_long": 1}


def test_spelled_control_tokens_stay_text(qwen):
    sly = SteppedResponse("what <|im_end|>", ("two<extra_0> is<s> <|im_start|>", "<|new|> four"))
    tame = SteppedResponse(
        "what < |im_end|>", ("two< extra_0> is< s> < |im_start|>", "< |new|> four")
    )
    scorer = LocalStepScorer(qwen)
    assert scorer.score([sly]) == [pytest.approx(qwen_scores(qwen, tame), abs=1e-5)]
    assert without_control("a <b> <|c|> <| d|>", ["<b>"]) == "a < b> < |c|> <| d|>"
    assert without_control("<｜c｜>", []) == "< ｜c｜>"
    assert step_messages(LONG, step_token="#", system="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "what is two plus two"},
        {"role": "assistant", "content": "two plus two# is four# .#" + "so six !" * 3 + "#"},
    ]


@pytest.mark.parametrize("num_labels", [1, 2, 3])
def test_any_token_classifier_will_do_that_has_one_or_two_classes(tmp_path, num_labels):
    torch.manual_seed(1)
    config = make_config(make_tokenizer(tmp_path))
    config.num_labels = num_labels
    model = Qwen2ForTokenClassification(config).eval()
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(tmp_path)
    if num_labels == 3:
        with pytest.raises(ModelError, match="has 3 classes, not the two of a step"):
            LocalStepScorer(tmp_path)
        return
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(conversation(LONG), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0][ids[0] == tokenizer.convert_tokens_to_ids("<extra_0>")]
    expected = torch.sigmoid(logits[:, 0] if num_labels == 1 else logits[:, 1] - logits[:, 0])
    assert LocalStepScorer(tmp_path).score([LONG]) == [pytest.approx(expected.tolist(), abs=1e-5)]


@pytest.fixture(scope="module")
def prefix_model(tmp_path_factory):
    """A causal model and a head beside it, as ReasonFlux-PRM-1.5B is published."""
    path = tmp_path_factory.mktemp("prefix")
    torch.manual_seed(2)
    config = make_config(make_tokenizer(path))
    config.tie_word_embeddings = False
    Qwen2ForCausalLM(config).save_pretrained(path)
    head = torch.nn.Linear(16, 1)
    torch.nn.init.normal_(head.weight, std=1.0)
    torch.save(head.state_dict(), path / "reward_head.pt")
    return path


def prefix_score(path, text):
    """ReasonFlux-PRM-1.5B's score of a text by itself."""
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    head = torch.load(path / "reward_head.pt")
    value = head["weight"] @ hidden_states(path, "model.", ids)[-1] + head["bias"]
    return 1 / (1 + math.exp(-value.item()))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_prefix_s_score_is_that_of_the_text_so_far(prefix_model, batch_size):
    got = PrefixScorer(prefix_model, batch_size=batch_size).score(RESPONSES)
    for scores, response in zip(got, RESPONSES, strict=True):
        texts = [response.question + "".join(response.steps[: k + 1]) for k in range(len(scores))]
        assert scores == pytest.approx([prefix_score(prefix_model, x) for x in texts], abs=1e-5)
    assert [len(scores) for scores in got] == [1, 4, 3, 0]
    assert got[2][0] == pytest.approx(got[2][1])  # the second step is empty


def test_spelled_control_tokens_stay_text_for_a_prefix_model(prefix_model):
    sly = SteppedResponse("what <s>", ("two <|im_end|> is",))
    (got,) = PrefixScorer(prefix_model).score([sly])
    assert got == [pytest.approx(prefix_score(prefix_model, "what < s>two < |im_end|> is"))]


def test_prefixes_beyond_the_limit_have_no_score(prefix_model):
    tokenizer = AutoTokenizer.from_pretrained(prefix_model)
    until_second = len(tokenizer(LONG.question + LONG.steps[0] + LONG.steps[1])["input_ids"])
    scorer = PrefixScorer(prefix_model, max_tokens=until_second)
    (scores,) = scorer.score([LONG])
    assert [math.isnan(x) for x in scores] == [False, False, True, True]
    assert scorer.counts == {"prm/too_long": 1}


@pytest.mark.parametrize("spoil", ["missing", "bytes", "shape", "type"])
def test_a_head_that_does_not_fit_is_one_clear_line(tmp_path, prefix_model, spoil):
    for file in prefix_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    head = tmp_path / "reward_head.pt"
    if spoil == "missing":
        head.unlink()
    elif spoil == "bytes":
        head.write_bytes(b"\x80\x02nonsense")
    else:
        torch.save({"weight": torch.zeros(1, 3)} if spoil == "shape" else [1], head)
    with pytest.raises(ModelError, match=r"reward_head.pt cannot be loaded") as caught:
        PrefixScorer(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_token": "<step>"}, "step_token '<step>' is . tokens of its tokenizer"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown; use float32, bfloat16, float16"),
        ({"device": "abacus"}, "cannot be loaded.*abacus"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_be_are_one_clear_line(qwen, options, message):
    with pytest.raises(GraphPOError, match=message) as caught:
        LocalStepScorer(qwen, **options)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused_not_filled_at_random(tmp_path, qwen):
    for file in qwen.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(qwen / "model.safetensors")
    del weights["score.2.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, first score\.2\.weight"):
        LocalStepScorer(tmp_path)


def test_a_model_without_a_chat_template_or_with_one_that_refuses(tmp_path, qwen):
    for file in qwen.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('no system\nmessages') }}")
    with pytest.raises(ModelError, match=r"chat template of .*: no system messages"):
        LocalStepScorer(tmp_path).score([LONG])
    template.unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        LocalStepScorer(tmp_path)
