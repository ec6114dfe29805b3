import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from graphpo_agent.cli import main
from graphpo_agent.config import (
    AgentMode,
    LocalEngineConfig,
    RunConfig,
    SearchR1DialectConfig,
    SftConfig,
    VllmEngineConfig,
)
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.config_state import HashingEmbedderConfig, TextState
from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects.hermes import HermesDialect
from graphpo_agent.rollout.dialects.search_r1 import SearchR1Dialect
from tests.worlds import run_arguments, sft_overrides

ROOT = Path(__file__).parent.parent
KB = ROOT / "configs/toy/kb.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("method.merge_treshold=0.9", "method.merge_treshold: unknown key of 'graphpo'"),
        ("train.stepz=5", "train.stepz: unknown key"),
        ("trian.steps=5", "trian: unknown key (override 'trian.steps=5')"),
        ("method.schedule=8", "method.schedule: Input should be a list (got 8)"),
        ("method.merge_threshold=0", "method.merge_threshold: Input should be greater"),
        ("method.merge_threshold=1.01", "less than or equal to 1 (got 1.01)"),
        ("method.merge_threshold=.nan", "method.merge_threshold"),
        ("method.schedule=[6,0,1]", "method.schedule.1: Input should be greater"),
        ("method.schedule=[]", "method.schedule"),
        ("method.pool_weight=-0.1", "method.pool_weight"),
        ("method.efficiency_weight=.inf", "method.efficiency_weight"),
        ("method.name=nonesuch", "method.name: Input should be 'graphpo', 'tree', 'grpo', 'dapo'"),
        ("state.kind=foo", "'frozen_summary' or 'text' (got 'foo') (override 'state.kind=foo')"),
        ("state.kind=[1]", "state.kind: Input should be 'key', "),
        ("mode.kind=foo", "mode.kind: Input should be 'segment' or 'agent' (got 'foo')"),
        ("engine={kind: foo}", "engine.kind: Input should be 'local', 'vllm' or 'verl'"),
        ("mode.dialect=foo", "mode.dialect.kind: Input should be 'search_r1', 'asearcher' or"),
        ("state={kind: text, embedder: {kind: foo}}", "state.embedder.kind: Input should be"),
        ("method=grpo", "method: Input should be a mapping of keys (got 'grpo')"),
        ("train.steps=null", "train: needs steps, token_budget or both"),
        ("train.prompts_per_step=0", "train.prompts_per_step"),
        ("mode.max_turns=two", "mode.max_turns"),
        ("mode.tools.search.class=tools.search", "needs the key 'class' with module:Class"),
        ("reward=5", "reward: Input should be module:function or a mapping with the key 'class' ("),
        ("reward={a: 1}", "reward: needs the key 'class' with module:Class"),
        ("seed=-1", "seed"),
        ("train=5", "train: "),
        ("update.clip_low=1.5", "update.clip_low"),
        ("sampling.temperature=0", "for temperature 0 give eval --greedy"),
        ("train.steps=yes", "train.steps: Input should be a number, not true or false (got True)"),
        ("method.pool_weight=true", "method.pool_weight: Input should be a number"),
        ("mode.max_turns=99999999999999999999", "mode.max_turns: Input should be less than"),
        ("threads=5000", "threads: Input should be less than or equal to 4096"),
        ("seed=9223372036854775808", "seed: Input should be less than 2**63"),
        (
            "state={kind: text, embedder: {kind: tei, url: host}}",
            "state.embedder.url: Input should",
        ),
        ("state={kind: text, embedder: {kind: hashing, dimension: 1048577}}", "embedder.dimension"),
        ("output=''", "output: Input should be a path"),
        ('model.path="a\\0"', "model.path: Input should be a path"),
        ('tasks.train=[a, "b\\n"]', "tasks.train.1: Input should be a path"),
        ("engine.kv_cache_gib=1", "engine.kv_cache_gib: unknown key of 'local'"),
        ("engine.max_batch_gib=1e300", "engine.max_batch_gib: Input should be less than or equal"),
        ("engine.max_batch_gib=0", "engine.max_batch_gib: Input should be greater than 0"),
        ("mode.dialect={documents: none}", "mode.dialect.documents: Input should be"),
        ("state={function: f}", "state: needs the key 'kind'"),
        ("method={schedule: [2]}", "method: needs the key 'name'"),
        ("state={kind: text, embedder: {dimension: 8}}", "state.embedder: needs the key 'kind'"),
        ("method.pool_weight=1.5", "method.pool_weight: Input should be less than or equal to 1"),
        ("method={name: grpo, group_size: 1}", "method.group_size: Input should be greater than"),
        ("method={name: pros, pool: {decay: 2}}", "method.pool.decay: Input should be less than"),
        ("model.lora={alpha: 0}", "model.lora.alpha: Input should be greater than 0"),
        ("model={path: m, dtype: bfloat16, autocast: true}", "model: autocast needs dtype float32"),
        ('model.path="a\\ud800"', "model.path: Input should be a path"),
        ("outage_limit=0", "outage_limit: Input should be greater than 0"),
        ("sampling.temperature=.inf", "sampling.temperature: Input should be at least 0.01 and"),
        ("sampling.top_p=1.5", "sampling.top_p: Input should be less than or equal to 1"),
        ("update.dual_clip=1", "update.dual_clip: Input should be greater than 1"),
        ("update.learning_rate=.inf", "update.learning_rate: Input should be a finite number"),
        ("update.clip_high=1e39", "update.clip_high: Input should be at most 1e+38, or .inf"),
        ("update.mismatch_cap=1e39", "update.mismatch_cap: Input should be at most 1e+38"),
        (
            "engine={kind: verl, max_context_tokens: 8, ray_address: x}",
            "engine.ray_address: Input should be auto or host:port",
        ),
        ("update.mismatch_cap=0.5", "update.mismatch_cap: Input should be greater than or equal"),
        (
            "update={minibatch_graphs: 1, old_logprobs: rollout, mismatch_cap: 2}",
            "update: mismatch_cap weighs recomputed log-probabilities against the sampler's: set",
        ),
    ],
)
def test_a_bad_value_is_one_line_with_the_key(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, KB, [override])
    message = str(caught.value)
    assert says in message
    assert message.startswith(str(KB))
    assert "\n" not in message


def test_the_last_override_of_a_key_is_to_blame_and_of_none_the_file(tmp_path: Path) -> None:
    overrides = ["method={name: grpo, group_size: 4}", "method.group_size=5", "method.group_size=x"]
    with pytest.raises(ConfigError, match=r"group_size: .*\(override 'method.group_size=x'\)$"):
        load_config(RunConfig, KB, overrides)
    file = tmp_path / "more.yaml"
    for text, where in (
        ("seed: x", "seed"),
        ("train: {steps_more: 5}", "train.steps_more"),
        ("train: {steps: null}", "train"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(RunConfig, KB, ["train.steps=5", str(file)])
        message = str(caught.value)
        assert f"{KB} + {file}: {where}: " in message and "(override" not in message


@pytest.mark.parametrize(
    "override", ["train.steps", "=5", "output.deep=1", "seed=[1", "seed=2026-13-01"]
)
def test_a_malformed_override_names_itself(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, KB, [override])
    message = str(caught.value)
    assert repr(override) in message
    assert ("write key.subkey=value" in message) == (override in ("train.steps", "=5"))


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    more = tmp_path / "more.yaml"
    more.write_text("tasks: {train: [~/a.jsonl, b.jsonl], heldout: x~/c.jsonl}\n")
    search = "mode.tools.search.retriever.directory=~/index"
    config = load_config(RunConfig, KB, [str(more), "model.path=~/policy", search])
    assert config.model.path == f"{tmp_path}/policy"
    assert config.tasks.train == (f"{tmp_path}/a.jsonl", "b.jsonl")
    assert config.tasks.heldout == "x~/c.jsonl"
    assert f"directory: {tmp_path}/index" in dump_config(config)
    with pytest.raises(ConfigError, match=r"an alias .* stands inside what it names"):
        load_config(RunConfig, KB, ["reward={class: 'a:b', of: &loop [*loop]}"])


def test_an_override_with_a_key_twice_says_so() -> None:
    with pytest.raises(ConfigError, match="not YAML: the key 'steps' occurs twice"):
        load_config(RunConfig, KB, ["train={prompts_per_step: 1, steps: 1, steps: 2}"])


def test_coarse_weights_are_not_trained_but_may_sample_and_carry_adapters(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coarse = run_arguments(reach, tmp_path / "run", "model.dtype=bfloat16", "train.steps=1")
    sft = [str(ROOT / "configs/toy/reach_sft.yaml"), *sft_overrides(reach)]
    sft += ["model.dtype=bfloat16", f"output={tmp_path / 'policy'}"]
    for arguments in (["train", *coarse], ["train", *coarse, "--dry-run"], ["sft", *sft]):
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert "model.dtype bfloat16" in shown.err and "model.autocast" in shown.err
    graphs = str(tmp_path / "graphs.jsonl")
    assert main(["rollout", *coarse, "--count", "1", "--out", graphs]) == 0
    assert main(["eval", *coarse]) == 0
    assert main(["train", *coarse, "model.lora={rank: 2}"]) == 0


@pytest.mark.parametrize(
    ("overrides", "says", "whole"),
    [
        (
            ["engine.max_batch_gib=2", "engine.kind=vllm"],
            "engine.max_batch_gib: unknown key of 'vllm'",
            "engine={kind: vllm}",
        ),
        (["method.name=grpo"], "method.group_size: is missing (and 2 more)", "method={name: grpo}"),
        (["state.kind=text"], "state.embedder: is missing", "state={kind: text}"),
    ],
)
def test_keys_of_another_kind_are_told_how_to_go(
    overrides: list[str], says: str, whole: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, KB, overrides)
    assert says in str(caught.value)
    key = overrides[-1].partition("=")[0]
    hint = f"; {key} keeps the other keys: {whole} replaces the whole section"
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize("override", ["engine.kind=verl", "method.schedul=[2]"])
def test_no_section_is_to_be_replaced_for_a_key_that_is_missing_or_unknown(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, KB, [override])
    assert "replaces the whole section" not in str(caught.value)


def test_a_section_can_be_replaced_by_another_kind() -> None:
    config = load_config(RunConfig, KB, ["engine.max_batch_gib=2", "engine={kind: vllm}"])
    assert config.engine == VllmEngineConfig(kind="vllm")


def test_a_further_file_replaces_a_section_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "more.yml"
    file.write_text("state: {kind: text, embedder: {kind: hashing}}\n")
    text = TextState(kind="text", embedder=HashingEmbedderConfig(kind="hashing"))
    assert load_config(RunConfig, KB, [str(file)]).state == text


def test_a_section_that_is_null_is_begun() -> None:
    overrides = ["model.lora=null", "model.lora.rank=4", "model.lora.alpha=8"]
    lora = load_config(RunConfig, KB, overrides).model.lora
    assert lora is not None and (lora.rank, lora.alpha) == (4, 8.0)


def test_overrides_replace_values_and_make_sections() -> None:
    config = load_config(
        RunConfig,
        KB,
        ["method.schedule=[3, 2]", "sampling.top_p=0.9", "train.token_budget=100_000"],
    )
    assert config.method.name == "graphpo"
    assert config.method.schedule == (3, 2)
    assert config.sampling.top_p == 0.9
    assert config.train.token_budget == 100000


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        (["engine.max_batch_gib=0.5"], LocalEngineConfig(max_batch_gib=0.5)),
        (["engine={}"], LocalEngineConfig()),
        (
            ["engine.kv_cache_gib=2", "engine.kind=vllm"],
            VllmEngineConfig(kind="vllm", kv_cache_gib=2),
        ),
    ],
)
def test_a_part_that_names_no_kind_is_of_its_default(
    overrides: list[str], engine: LocalEngineConfig | VllmEngineConfig
) -> None:
    assert load_config(RunConfig, KB, overrides).engine == engine


@pytest.mark.parametrize(
    ("kind", "dialect"), [("hermes", HermesDialect), ("search_r1", SearchR1Dialect)]
)
def test_what_is_not_said_of_a_dialect_is_as_in_its_class(kind: str, dialect: type) -> None:
    mode = load_config(RunConfig, KB, [f"mode.dialect={kind}"]).mode
    assert isinstance(mode, AgentMode)
    parameters = inspect.signature(dialect).parameters
    said = mode.dialect.model_dump(exclude={"kind"})
    defaults = {name: parameters[name].default for name in said}
    assert said == defaults


def test_a_part_of_a_part_that_names_no_kind_is_of_its_default() -> None:
    mode = load_config(RunConfig, KB, ["mode.dialect={documents: verl}"]).mode
    assert isinstance(mode, AgentMode)
    assert mode.dialect == SearchR1DialectConfig(documents="verl")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("", "mapping"),
        ("a: [", "not YAML"),
        ("a: 2026-13-01", "not YAML: month"),
        ("seed: 1\nseed: 2", "not YAML: the key 'seed' occurs twice, line 2"),
        ("- 1", "mapping"),
        ("\xff", "not UTF-8"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(RunConfig, path)
    assert str(path) in str(caught.value)


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(RunConfig, KB)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(RunConfig, path) == config


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("[!m]*/*.yaml")), ids=lambda p: p.stem
)
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_config(SftConfig if path.stem.endswith("_sft") else RunConfig, path)


def test_config_and_core_import_no_torch() -> None:
    program = (
        "import sys, graphpo_agent.config, graphpo_agent.graph.credit, graphpo_agent.graph.jsonl, "
        "graphpo_agent.graph.equivalence, graphpo_agent.graph.samples, graphpo_agent.cli\n"
        "print([m for m in ('torch', 'transformers', 'requests') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
