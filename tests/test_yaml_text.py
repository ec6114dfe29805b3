import pytest

from graphpo_agent.yaml_text import NotYaml, parse_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' occurs twice, line 3, column 1"),
        ("{a: {b: 1, b: 1}}", "the key 'b' occurs twice"),
        ("a: 2026-13-01", "month must be in 1..12"),
        ("!!int abc", "invalid literal"),
        ("0x_", "invalid literal"),
        ("!!bool perhaps", "does not fit its tag"),
        ("!!timestamp now", "does not fit its tag"),
        ("[" * 3000, "nested too deeply"),
        ("a: [1", "expected"),
        ("a:\n\t- 1", "cannot start any token"),
        ("\0", "special characters"),
        ("a: 1\n---\nb: 2", "single document"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_is_no_yaml_is_one_line(text: str, says: str) -> None:
    with pytest.raises(NotYaml) as caught:
        parse_yaml(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and "<unicode string>" not in str(caught.value)


def test_a_merged_mapping_may_say_a_key_again_and_keys_of_two_kinds_differ() -> None:
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], y: 4}")
    assert merged["b"] == {"x": 3, "y": 2}
    assert merged["c"] == {"x": 3, "y": 4}
    assert parse_yaml("{1: a, '1': b}") == {1: "a", "1": "b"}
    assert parse_yaml("") is None


def test_a_power_of_ten_is_a_number_and_a_text_that_looks_like_one_comes_back() -> None:
    assert parse_yaml("[1e-3, -2E4, 1.5e+2, .5e1, 1.e0]") == [0.001, -20000, 150, 5, 1]
    texts = ["1e-3", "12e4", "e-3", "1e", "1e3x", "0x1e3"]
    assert parse_yaml(to_yaml({"texts": texts, "number": 1e-05})) == {
        "texts": texts,
        "number": 1e-05,
    }


def test_a_value_within_braces_comes_back() -> None:
    value = {"kind": "text", "embedder": {"model": "7e5", "sizes": [1, 0.5]}}
    assert "\n" not in to_yaml(value, braces=True).strip() and parse_yaml(to_yaml(value)) == value
    assert parse_yaml(to_yaml(value, braces=True)) == value
