"""Settings: a wrong value fails at once, and the error names the field, the value and what to write instead."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from steadygrad import (
    Action,
    AdaGC,
    AdaptiveUnitClip,
    AutoClip,
    ClipValue,
    ConfigError,
    DetectConfig,
    FixedNorm,
    GuardConfig,
    Incident,
    MeasureConfig,
    OutlierClip,
    Policy,
    Precision,
    RecordConfig,
    SnapshotConfig,
    SteadygradError,
    ZClip,
)
from steadygrad.config import ClipStrategy, Implementation, Interval

NAN, INF = math.nan, math.inf

STRATEGIES: list[ClipStrategy] = [
    FixedNorm(max_norm=0.5),
    OutlierClip(ratio=5.0, window=64, warmup=16),
    ClipValue(value=0.25),
    ZClip(alpha=0.9, z=3.0, warmup=7, max_norm=None, eps=1e-5),
    AutoClip(percentile=25.0, window=64),
    AdaptiveUnitClip(ratio=0.02, eps=1e-4, exclude=("head", "embed.weight")),
    AdaGC(relative=1.2, beta=0.9, warmup=11, max_norm=2.0),
]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.kind)


# --- wrong values ---------------------------------------------------------------------------------------------------

BAD_VALUES: list[tuple[type, str, list[Any], str]] = [
    # class, field, values to refuse, advice to find in the message
    (FixedNorm, "max_norm", [0, 0.0, -1.0, NAN, -INF, None, "1.0", True], "clip=None"),
    (ClipValue, "value", [0, -0.5, NAN, None, "1.0"], "Use 1.0"),
    (ZClip, "alpha", [0, 1, 1.5, -0.1, NAN, None, "0.97"], "0.97"),
    (ZClip, "z", [0, -2.5, NAN, None, "2.5"], "2.5"),
    (ZClip, "warmup", [1, 0, -3], "25"),
    (ZClip, "max_norm", [0, -1.0, NAN, "1.0"], "Use 1.0"),
    (ZClip, "eps", [0, -1e-6, NAN, None], "1e-6"),
    (AutoClip, "percentile", [-1, 101, NAN, None, "10"], "10"),
    (AutoClip, "window", [1, 0, -4096], "4096"),
    (AdaptiveUnitClip, "ratio", [0, -0.01, NAN, None], "0.01"),
    (AdaptiveUnitClip, "eps", [0, -1e-3, NAN, None], "1e-3"),
    (AdaGC, "relative", [0, -1.05, NAN, None], "1.05"),
    (AdaGC, "beta", [0, 1, 2, -0.98, NAN, None], "0.98"),
    (AdaGC, "warmup", [0, -1], "100"),
    (AdaGC, "max_norm", [0, -1, NAN, None], "Use 1.0"),
    (MeasureConfig, "parameters_every", [-1], "0 switches it off"),
    (RecordConfig, "steps_every", [0, -1], "Use 1"),
    (RecordConfig, "layers_every", [-1], "0 switches it off"),
    (DetectConfig, "window", [7, 0, -128], "128"),
    (DetectConfig, "min_values", [1, 129], "32"),
    (DetectConfig, "exploding_norm", [0, -100.0, NAN], "100"),
    (GuardConfig, "clip", ["fixed_norm", 1.0, FixedNorm, {"kind": "fixed_norm"}], "clip=FixedNorm(max_norm=1.0)"),
    (GuardConfig, "on_nonfinite", ["clip", Action.ROLLBACK, "none"], "SKIP is the safe choice"),
    (GuardConfig, "sanitize_value", [NAN, INF, -INF, None, "0", True], "Use 0.0"),
    (GuardConfig, "on_incident", [3, "print"], "called with each Incident"),
    (GuardConfig, "measure", [None, {}, RecordConfig()], "MeasureConfig"),
    (GuardConfig, "detect", [None, {}], "DetectConfig"),
    (GuardConfig, "record", [None, {}], "RecordConfig"),
]


@pytest.mark.parametrize(
    ("cls", "field", "value", "advice"),
    [
        pytest.param(cls, field, value, advice, id=f"{cls.__name__}.{field}={value!r}")
        for cls, field, values, advice in BAD_VALUES
        for value in values
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_advice(cls: type, field: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{cls.__name__}.{field} must ")
    assert re.search(rf"got .*{re.escape(str(value) if isinstance(value, str) else repr(value)[:12])}", message)
    assert advice in message


@pytest.mark.parametrize(
    ("field", "value", "options"),
    [
        ("on_nonfinite", "ignore", ("skip", "sanitize", "raise")),
        ("on_nonfinite", None, ("skip", "sanitize", "raise")),
        ("on_nonfinite", 5, ("skip", "sanitize", "raise")),
        ("autocast", "bf17", ("bf16", "fp16", "fp32")),
        ("scheduler_interval", "batch", ("step", "epoch")),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(field: str, value: Any, options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        GuardConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"GuardConfig.{field}")
    assert f"got {value!r}" in message
    assert all(option in message for option in options)


@pytest.mark.parametrize(
    ("cls", "field", "values"),
    [
        (ZClip, "warmup", [2.5, "25", None, True]),
        (AutoClip, "window", [2.5, "a", None]),
        (AdaGC, "warmup", [1.5, "a"]),
        (RecordConfig, "steps_every", [1.5, "a", True]),
        (RecordConfig, "layers_every", [0.5, None]),
        (MeasureConfig, "parameters_every", [0.5, "a"]),
        (MeasureConfig, "scan_every", [0.5, "a"]),
        (MeasureConfig, "implementation", ["nonsense", 3, None, []]),
        (AdaptiveUnitClip, "exclude", ["head", (1,), 5, None]),
        (DetectConfig, "off", ["loss_spike", (1,), 5]),
        (DetectConfig, "rules", [5, "mine"]),
        (Policy, "actions", [5, "rollback", ["loss_spike"]]),
        (Policy, "act", ["no", 0, None]),
        (SnapshotConfig, "enabled", ["no", 1]),
        (GuardConfig, "drop_bad_microbatches", ["yes", 1, None]),
        (GuardConfig, "sanitize_value", ["0", [0]]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_field(cls: type, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{cls.__name__}\.{field}\b.* got {re.escape(repr(value))}"):
            cls(**{field: value})


@pytest.mark.parametrize(("cls", "field"), [(AdaptiveUnitClip, "exclude"), (DetectConfig, "off")])
def test_a_single_name_as_text_is_refused_with_the_right_spelling(cls: type, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"Write {field}=\('head',\)"):
        cls(**{field: "head"})


def test_a_config_error_is_a_value_error_and_a_steadygrad_error() -> None:
    with pytest.raises(ValueError) as caught:
        FixedNorm(max_norm=0)
    assert isinstance(caught.value, SteadygradError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedNorm(max_norm=INF),  # measure, never clip
        lambda: FixedNorm(max_norm=1),
        lambda: ZClip(max_norm=None),
        lambda: AutoClip(percentile=0),
        lambda: AutoClip(percentile=100),
        lambda: AdaptiveUnitClip(exclude=["head"]),  # type: ignore[arg-type]
        lambda: MeasureConfig(parameters_every=0),
        lambda: RecordConfig(steps_every=1, layers_every=0),
        lambda: GuardConfig(clip=None),
        lambda: GuardConfig(sanitize_value=-1),
        lambda: GuardConfig(on_incident=print),
    ],
)
def test_extreme_valid_values_are_accepted(make: Any) -> None:
    assert dataclasses.is_dataclass(make())


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [Action.RAISE, Action.HALT, "raise", "RAISE", "halt"])
def test_raise_has_several_spellings(word: Any) -> None:
    assert GuardConfig(on_nonfinite=word).on_nonfinite is Action.RAISE is Action.HALT


@pytest.mark.parametrize("word", ["skip", "SKIP", "sanitize", Action.SANITIZE])
def test_words_become_enum_members(word: Any) -> None:
    assert isinstance(GuardConfig(on_nonfinite=word).on_nonfinite, Action)


def test_precision_and_interval_are_read_from_text() -> None:
    config = GuardConfig(autocast="bf16", scheduler_interval="epoch")  # type: ignore[arg-type]
    assert config.autocast is Precision.BF16
    assert config.scheduler_interval is Interval.EPOCH


@pytest.mark.parametrize("word", ["reference", "REFERENCE", Implementation.REFERENCE])
def test_an_implementation_is_read_from_text(word: Any) -> None:
    assert MeasureConfig(implementation=word).implementation is Implementation.REFERENCE


def test_a_list_is_kept_as_a_tuple() -> None:
    names = ["head"]
    settings = AdaptiveUnitClip(exclude=names)  # type: ignore[arg-type]
    names.append("tail")
    assert settings.exclude == ("head",)


# --- value objects --------------------------------------------------------------------------------------------------

VALUE_OBJECTS = [*STRATEGIES, MeasureConfig(), DetectConfig(), RecordConfig(), GuardConfig()]
every_object = pytest.mark.parametrize("thing", VALUE_OBJECTS, ids=lambda thing: type(thing).__name__)


@every_object
def test_settings_cannot_be_changed(thing: Any) -> None:
    before = copy.deepcopy(thing)
    for field in dataclasses.fields(thing):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field.name, getattr(thing, field.name))
    assert thing == before


@every_object
def test_settings_are_keyword_only(thing: Any) -> None:
    assert all(field.kw_only for field in dataclasses.fields(thing))
    first = dataclasses.fields(thing)[0]
    with pytest.raises(TypeError, match="positional"):
        type(thing)(getattr(thing, first.name))


@every_object
def test_every_setting_has_a_default(thing: Any) -> None:
    assert isinstance(type(thing)(), type(thing))


def test_settings_are_compared_by_value_and_changed_by_replacing() -> None:
    config = GuardConfig(clip=ZClip())
    assert config == GuardConfig(clip=ZClip())
    assert config != GuardConfig()
    assert dataclasses.replace(config, clip=None).clip is None
    with pytest.raises(ConfigError):
        dataclasses.replace(FixedNorm(), max_norm=-1.0)


def test_the_default_clips_outliers_and_skips() -> None:
    config = GuardConfig()
    assert config.clip == OutlierClip(ratio=100.0)
    assert config.on_nonfinite is Action.SKIP
    assert config.sanitize_value == 0.0
    assert config.drop_bad_microbatches is False
    assert config.autocast is None


# --- plain values and back ------------------------------------------------------------------------------------------


@every_strategy
def test_every_strategy_survives_conversion_to_plain_values(strategy: ClipStrategy) -> None:
    config = GuardConfig(
        clip=strategy,
        on_nonfinite=Action.SANITIZE,
        sanitize_value=0.5,
        drop_bad_microbatches=True,
        autocast=Precision.BF16,
        scheduler_interval=Interval.EPOCH,
        measure=MeasureConfig(implementation=Implementation.REFERENCE, parameters_every=10),
        detect=DetectConfig(exploding_norm=50.0, window=64),
        record=RecordConfig(steps_every=2, layers_every=0),
    )
    plain = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert plain["clip"]["kind"] == strategy.kind
    assert GuardConfig.from_dict(plain) == config


def test_kinds_are_unique() -> None:
    assert len({strategy.kind for strategy in STRATEGIES}) == len(STRATEGIES) == len(ClipStrategy.__args__)


def test_no_clipping_and_the_default_survive_conversion() -> None:
    for config in (GuardConfig(clip=None), GuardConfig()):
        assert GuardConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_missing_fields_keep_their_defaults() -> None:
    assert GuardConfig.from_dict({}) == GuardConfig()
    assert GuardConfig.from_dict({"clip": {"kind": "zclip", "z": 3}}).clip == ZClip(z=3.0)


def test_callables_are_left_out_of_plain_values() -> None:
    called: list[Incident] = []
    plain = GuardConfig(on_incident=called.append).to_dict()
    json.dumps(plain)
    assert GuardConfig.from_dict(plain).on_incident is None


def test_words_are_written_as_their_values() -> None:
    plain = GuardConfig(on_nonfinite=Action.RAISE, autocast=Precision.FP16).to_dict()
    assert (plain["on_nonfinite"], plain["autocast"]) == ("halt", "fp16")


# --- wrong plain values ---------------------------------------------------------------------------------------------


def refuse(values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        GuardConfig.from_dict(values)
    return str(caught.value)


def test_every_unknown_and_wrong_field_is_named_in_one_error() -> None:
    message = refuse(
        {
            "clipp": {"kind": "zclip"},
            "on_nonfinite": "ignore",
            "autocast": "bf17",
            "drop_bad_microbatches": "yes",
            "measure": {"implementation": "cuda", "parametersevery": 3},
            "record": {"steps_every": 1.5},
            "detect": 7,
            "clip": {"kind": "zclip", "alfa": 0.9, "warmup": "many"},
        }
    )
    assert message.startswith("10 wrong fields:")
    for where, found in {
        "clipp": "unknown",
        "on_nonfinite": "'ignore'",
        "autocast": "'bf17'",
        "drop_bad_microbatches": "'yes'",
        "measure.implementation": "'cuda'",
        "measure.parametersevery": "unknown",
        "record.steps_every": "1.5",
        "detect": "7",
        "clip.alfa": "unknown",
        "clip.warmup": "'many'",
    }.items():
        lines = [line for line in message.splitlines() if line.strip().startswith(f"{where}: ")]
        assert len(lines) == 1, where
        assert found in lines[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"clip": {"kind": "zclip", "alpha": 2, "z": -1}}, ["clip: ZClip.alpha", "clip: ZClip.z "]),
        ({"record": {"stepz": 1, "layers_every": -1}}, ["record.stepz: unknown", "record: RecordConfig.layers_every"]),
        (
            {"clip": {"kind": "fixed_norm", "max_norm": -1}, "on_nonfinite": "clip"},
            ["clip: FixedNorm.max_norm", "GuardConfig: GuardConfig.on_nonfinite"],
        ),
        (
            {"detect": {"loss": {"block": 1, "level_window": 0}, "exploding_norm": -1}},
            ["detect.loss: LossThresholds.level_window", "detect.loss: LossThresholds.block", "detect: DetectConfig."],
        ),
        ({"detect": {"window": 4, "min_values": 200}}, ["detect: DetectConfig.window"]),  # 200 may fit another window
        ({"detect": {"window": "a", "min_values": 200}}, ["detect.window: must be int"]),
        ({"detect": {"window": 16}}, ["detect: DetectConfig.min_values must lie between 2 and the window, got 32"]),
    ],
)
def test_every_value_out_of_range_is_named_at_once(values: Any, expected: list[str]) -> None:
    first, *lines = refuse(values).splitlines()
    assert first == f"{len(expected)} wrong field{'s' if len(expected) > 1 else ''}:"
    for part in expected:
        assert sum(line.strip().startswith(part) for line in lines) == 1, part


@pytest.mark.parametrize("values", [[1], None, "clip", 3])
def test_a_value_that_is_not_a_mapping_is_refused_with_its_value(values: Any) -> None:
    assert f"mapping of field to value, got {values!r}" in refuse(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"clip": {"kind": ["zclip"]}}, "clip.kind: must be one of"),
        ({"clip": {"kind": "adaptive_unit", "exclude": [1]}}, "AdaptiveUnitClip.exclude must be a tuple of names"),
        ({"clip": {"kind": "fixed_norm", "max_norm": 10**400}}, "clip.max_norm: must be float"),
        ({"policy": {"actions": [1]}}, "policy.actions: must be Mapping"),
        ({3: 4}, "3: unknown"),
    ],
)
def test_wrong_plain_values_are_reported_with_their_path(values: Any, expected: str) -> None:
    assert expected in refuse(values)


def test_an_unknown_field_is_reported_with_the_known_fields() -> None:
    message = refuse({"record": {"every": 3}})
    assert "record.every: unknown; did you mean steps_every? RecordConfig has layers_every, steps_every" in message
    assert "record.weather: unknown; RecordConfig has" in refuse({"record": {"weather": 3}})
    message = refuse({"policy": {"loss_spike": "rollback"}})
    assert "policy.loss_spike: unknown; an answer to a kind of finding belongs into policy.actions. Policy" in message


def test_a_value_out_of_range_is_reported_with_its_path() -> None:
    message = refuse({"clip": {"kind": "fixed_norm", "max_norm": 0}, "record": {"steps_every": 0}})
    assert "clip: FixedNorm.max_norm must be above 0, got 0.0" in message
    assert "record: RecordConfig.steps_every must be a whole number, at least 1, got 0" in message


@pytest.mark.parametrize("clip", [{}, {"max_norm": 1.0}, {"kind": None}, {"kind": "agc"}, {"kind": 3}])
def test_a_strategy_of_unknown_kind_is_refused_with_the_known_kinds(clip: dict[str, Any]) -> None:
    message = refuse({"clip": clip})
    kinds = "fixed_norm, outliers, value, zclip, autoclip, adaptive_unit, adagc"
    assert f"clip.kind: must be one of {kinds}, got {clip.get('kind')!r}" in message


@pytest.mark.parametrize("clip", ["zclip", 1.0, ["zclip"], True])
def test_a_strategy_that_is_not_a_mapping_is_refused(clip: Any) -> None:
    assert f"clip: must be a mapping of fields, got {clip!r}" in refuse({"clip": clip})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"clip": {"kind": "zclip", "warmup": 25.0}}, "clip.warmup: must be int, got 25.0"),
        ({"clip": {"kind": "zclip", "warmup": True}}, "clip.warmup: must be int, got True"),
        ({"clip": {"kind": "fixed_norm", "max_norm": True}}, "clip.max_norm: must be float, got True"),
        ({"clip": {"kind": "fixed_norm", "max_norm": "much"}}, "clip.max_norm: must be float, got 'much'"),
        ({"clip": {"kind": "fixed_norm", "max_norm": None}}, "clip.max_norm: must be float, got None"),
        ({"clip": {"kind": "adaptive_unit", "exclude": "head"}}, "clip.exclude: must be tuple, got 'head'. Write ['"),
        ({"drop_bad_microbatches": 1}, "drop_bad_microbatches: must be bool, got 1"),
        ({"on_incident": "print"}, "on_incident: must be Callable, got 'print'"),
        ({"detect": None}, "detect: must be a mapping of fields, got None"),
    ],
)
def test_a_value_of_the_wrong_type_is_reported_with_the_right_type(values: dict[str, Any], expected: str) -> None:
    assert expected in refuse(values)


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("1E+2", 100.0), ("inf", INF), (" 0.5 ", 0.5)])
def test_numbers_that_yaml_reads_as_text_are_numbers(text: str, number: float) -> None:
    assert GuardConfig.from_dict({"clip": {"kind": "fixed_norm", "max_norm": text}}).clip == FixedNorm(max_norm=number)


def test_nan_written_as_text_is_still_refused() -> None:
    assert "max_norm must be above 0, got nan" in refuse({"clip": {"kind": "fixed_norm", "max_norm": "nan"}})


# --- files ----------------------------------------------------------------------------------------------------------

YAML = """
clip:
  kind: adagc
  relative: 1.1
  warmup: 50
on_nonfinite: raise
autocast: bf16
sanitize_value: 1e-3   # YAML 1.1 reads this as text
measure: {implementation: foreach, parameters_every: 100}
record:
  layers_every: 0
"""
TOML = """
on_nonfinite = "raise"
autocast = "bf16"
sanitize_value = 1e-3

[clip]
kind = "adagc"
relative = 1.1
warmup = 50

[measure]
implementation = "foreach"
parameters_every = 100

[record]
layers_every = 0
"""
FROM_FILE = GuardConfig(
    clip=AdaGC(relative=1.1, warmup=50),
    on_nonfinite=Action.RAISE,
    autocast=Precision.BF16,
    sanitize_value=1e-3,
    measure=MeasureConfig(implementation=Implementation.FOREACH, parameters_every=100),
    record=RecordConfig(layers_every=0),
)


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML)])
@pytest.mark.parametrize("as_text", [False, True], ids=["Path", "str"])
def test_a_file_gives_its_settings(name: str, text: str, as_text: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert GuardConfig.load(str(path) if as_text else path) == FROM_FILE


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("wrong.yaml", "clip: {kind: zclip, alfa: 1}\nrekord: 1\n", ("clip.alfa", "rekord", "2 wrong field")),
        ("wrong.toml", "rekord = 1\n[clip]\nkind = 'zclip'\nalfa = 1\n", ("clip.alfa", "rekord", "2 wrong field")),
        ("broken.yaml", "clip: [", ("not valid YAML", "(at line 1, column 8).")),
        ("broken.toml", "clip = [", ("not valid TOML",)),
        ("empty.yaml", "", ("the file is empty", "{}")),
        ("list.yaml", "- 1\n- 2\n", ("must hold a mapping", "list")),
        ("config.json", "{}", ("'.json' is not known", ".toml")),
    ],
)
def test_a_wrong_file_is_reported_by_name(name: str, text: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        GuardConfig.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert all(part in str(caught.value) for part in expected)


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_a_file_that_is_not_text_is_reported_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=rf"{name}: not UTF-8 text .*Save the file as UTF-8"):
        GuardConfig.load(tmp_path / name)


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        GuardConfig.load(tmp_path / "nowhere.yaml")


def test_an_empty_toml_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.touch()
    assert GuardConfig.load(path) == GuardConfig()
