"""Directories of adapters as models: merged into the model that they name, or one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from graphpo_agent.cli import main
from graphpo_agent.engines.local import adapter_files
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.model import load_model, model_without_weights
from graphpo_agent.engines.local.options import OptimizerOptions
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import GraphPOError, ModelError, RunError
from graphpo_agent.inputs import inputs_name
from graphpo_agent.local_chat import LocalChat
from tests.worlds import ROOT, run_arguments, sft_overrides

MakeModel = Callable[..., PreTrainedModel]
OPTIONS = LoraOptions(rank=3, alpha=6.0)


def write_adapters(base: Path, place: Path, tokenizer: HfTokenizer, seed: int = 0) -> None:
    """A checkpoint of random adapters at ``place/step``, and the same merged at ``place/model``."""
    model = load_model(str(base), torch.float64)
    torch.manual_seed(seed)
    add_adapters(model, OPTIONS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    engine = LocalEngine(model, tokenizer, OptimizerOptions())
    engine.save_checkpoint(place / "step")
    engine.save_model(place / "model")


@pytest.fixture
def place(make_model: MakeModel, tokenizer: HfTokenizer, tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "base")
    tokenizer.hf.save_pretrained(tmp_path / "base")
    write_adapters(tmp_path / "base", tmp_path, tokenizer)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_as_the_model_that_its_run_would_have_written(
    place: Path, tokenizer: HfTokenizer, dtype: torch.dtype
) -> None:
    loaded, merged = (load_model(str(place / name), dtype) for name in ("step", "model"))
    assert type(loaded) is type(merged) and not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    expected = merged.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    atol = 2 * float(max(value.abs().max() for value in expected.values())) * torch.finfo(dtype).eps
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol)
    assert not all(
        map(torch.equal, load_model(str(place / "base")).parameters(), expected.values())
    )
    LocalEngine(loaded, HfTokenizer.load(str(place / "step")), OptimizerOptions())


def test_a_checkpoint_upon_a_checkpoint_names_it(place: Path, tokenizer: HfTokenizer) -> None:
    write_adapters(place / "step", place / "second", tokenizer, seed=1)
    config = json.loads((place / "second/step/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(place / "step")
    merged = load_model(str(place / "second/model"), torch.float64)
    loaded = load_model(str(place / "second/step"), torch.float64)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=1e-15)


def test_its_sizes_are_known_without_weights(place: Path) -> None:
    (place / "base/model.safetensors").unlink()
    sizes = model_without_weights(str(place / "step"), torch.float32)
    expected = load_model(str(place / "model"))
    assert [p.shape for p in sizes.parameters()] == [p.shape for p in expected.parameters()]


def test_a_frozen_model_may_be_a_checkpoint(place: Path) -> None:
    messages = [{"role": "user", "content": "who mentored karo venn"}]
    replies = [LocalChat(place / name).reply(messages, 12) for name in ("step", "model", "base")]
    assert replies[0] == replies[1] != replies[2]


def damage(place: Path, how: str) -> None:
    config = place / "step/adapter_config.json"
    values = json.loads(config.read_text())
    weights = place / "step/adapter_model.safetensors"
    match how:
        case "base gone":
            (place / "base").rename(place / "elsewhere")
        case "no base":
            config.write_text(json.dumps(values | {"base_model_name_or_path": None}))
        case "itself":
            config.write_text(json.dumps(values | {"base_model_name_or_path": str(place / "step")}))
        case "not JSON":
            config.write_text("{")
        case "odd values":
            config.write_text(json.dumps(values | {"r": "many"}))
        case "weights gone":
            weights.unlink()
        case "weights damaged":
            weights.write_bytes(b"nothing")
        case "one weight gone":
            held = load_file(weights)
            held.popitem()
            save_file(held, weights)
        case _:
            config.write_text(json.dumps(values | {"r": 2}))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("base gone", "step holds adapters of another model: .*/base does not exist; check the"),
        ("no base", "names no base_model_name_or_path"),
        ("itself", "names itself"),
        ("not JSON", "damaged"),
        ("odd values", "cannot be merged into"),
        ("weights gone", "adapter_model.safetensors is missing"),
        ("weights damaged", "adapter_model.safetensors is damaged"),
        ("one weight gone", "belongs to another model: adapter .*lora_"),
        ("other rank", "belongs to another model"),
    ],
)
def test_adapters_that_cannot_be_used_are_one_line(place: Path, how: str, says: str) -> None:
    damage(place, how)
    with pytest.raises(GraphPOError, match=says) as caught:
        load_model(str(place / "step"), torch.float64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_one_weight_in_two_places_are_one_line(
    family: str,
    target: str,
    make_model: MakeModel,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    from peft import LoraConfig, get_peft_model

    make_model(family).save_pretrained(tmp_path / "base")
    base = load_model(str(tmp_path / "base"), torch.float64)
    ids = torch.arange(4, 12)[None]
    adapted = get_peft_model(
        base, LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    )
    adapted.save_pretrained(str(tmp_path / "adapters"), save_embedding_layers=False)
    recwarn.clear()
    if family == "llama":  # whose head has a weight of its own
        with torch.no_grad():
            expected = adapted(input_ids=ids).logits
            merged = load_model(str(tmp_path / "adapters"), torch.float64)(ids).logits
        torch.testing.assert_close(merged, expected, rtol=0, atol=1e-10)
        return
    with pytest.raises(ModelError, match="one weight there, and cannot be merged") as caught:
        load_model(str(tmp_path / "adapters"), torch.float64)
    assert "\n" not in str(caught.value)
    assert [str(each.message) for each in recwarn.list] == []


def test_a_checkpoint_upon_other_weights_is_another_policy(
    place: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    names = [inputs_name(str(place / "step"), {})]
    make_model(spread=0.4).save_pretrained(place / "base")
    names.append(inputs_name(str(place / "step"), {}))
    assert names[0] != names[1]


def test_adapters_go_on_upon_the_weights_that_they_were_trained_upon(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base, moved = tmp_path / "run", tmp_path / "base", tmp_path / "moved"
    shutil.copytree(reach / "policy", base)
    shutil.copytree(reach / "policy", moved)
    learning = (f"model.path={base}", "model.lora={rank: 2}", "train.steps=1")
    assert main(["train", *run_arguments(reach, run, *learning)]) == 0
    before = (run / "config.yaml").read_text(), (run / "metrics.jsonl").read_text()
    weights = "model.safetensors"
    shutil.copy(reach / "untrained" / weights, base)
    for change, says in (
        ("train.steps=2", f"has adapters of other weights than {base} holds now"),
        ("model.lora.alpha=5", "has adapters that are scaled by 32 / 2: leave model.lora as"),
    ):
        capsys.readouterr()
        assert main(["train", "--resume", str(run), change]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert before == ((run / "config.yaml").read_text(), (run / "metrics.jsonl").read_text())
    assert main(["train", "--resume", str(run), "train.steps=2", f"model.path={moved}"]) == 0


def test_without_peft_one_line_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "find_spec", lambda name: None)
    load_model(str(place / "model"))
    for load in (load_model, model_without_weights):
        with pytest.raises(GraphPOError, match=r"step holds adapters.*graphpo-agent\[lora\]"):
            load(str(place / "step"), torch.float32)


def test_a_run_without_adapters_does_not_go_on_from_adapters(
    place: Path, make_model: MakeModel, tokenizer: HfTokenizer
) -> None:
    engine = LocalEngine(make_model(), tokenizer, OptimizerOptions())
    with pytest.raises(RunError, match=r"holds adapters: go on with its run's model\.lora"):
        engine.load_checkpoint(place / "step")


def test_every_verb_takes_a_checkpoint_of_adapters(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    learning = ("model.lora={rank: 2}", "train.steps=1", "update.learning_rate=0.05")
    assert main(["train", *run_arguments(reach, run, *learning)]) == 0
    path = f"model.path={run / 'checkpoints/step-000001'}"

    def evaluated(path: str) -> str:
        out = tmp_path / "evaluated.jsonl"
        overrides = run_arguments(reach, tmp_path / "unused", path)
        assert main(["eval", *overrides, "--greedy", "--out", str(out)]) == 0
        return out.read_text()

    merged, base = f"model.path={run / 'model'}", f"model.path={reach / 'policy'}"
    assert evaluated(path) == evaluated(merged) != evaluated(base)
    graphs = str(tmp_path / "graphs.jsonl")
    arguments = run_arguments(reach, tmp_path / "unused", path)
    assert main(["rollout", *arguments, "--count", "2", "--out", graphs]) == 0
    assert main(["train", *arguments, "--dry-run"]) == 0
    for name, more in (("whole", []), ("again", ["model.lora={rank: 2}"])):
        further = run_arguments(reach, tmp_path / name, path, "train.steps=1", *more)
        assert main(["train", *further]) == 0
    assert main(["train", "--resume", str(tmp_path / "again"), "train.steps=2"]) == 0
    evaluated(f"model.path={tmp_path / 'again/checkpoints/step-000002'}")
    config = str(ROOT / "configs/toy/reach_sft.yaml")
    sft = [*sft_overrides(reach), path, f"output={tmp_path / 'policy'}"]
    assert main(["sft", config, *sft]) == 0
    assert capsys.readouterr().err.count("graphpo:") == 0
