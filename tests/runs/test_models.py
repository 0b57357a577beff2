"""A model knows what it takes, tells a wrong call by its parameter, and hashes what is asked the same everywhere."""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import random
import subprocess
import sys
import textwrap
import timeit
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import InvalidParameters, InvalidRequest
from semel.runs.models.model import MAIN, Model, load, make_model
from support.programs import Program, outcome

if TYPE_CHECKING:
    from nowhere import Missing


@dataclasses.dataclass
class Region:
    name: str
    codes: list[int] = dataclasses.field(default_factory=list)
    inside: "Region | None" = None


class Scenario(enum.Enum):
    HIGH = "high_inflation"
    LOW = "low_inflation"


class Prices(pydantic.BaseModel):
    base: int


class Engine:
    """A class that msgspec knows nothing of."""


def forecast(ctx, scenario: str, horizon_months: int, region: str = "AU"): ...
def anything(**values): ...
def nothing(): ...


FORECAST = make_model("baseline_forecast_v1", forecast)
ANYTHING = make_model("anything", anything)
ASKED = {"scenario": "high_inflation", "horizon_months": 24, "region": "AU"}

EXACT = 2**53
numbers = st.integers(-EXACT, EXACT) | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
parameters = st.dictionaries(text, values, max_size=5)


def shuffled(value: Any, order: random.Random) -> Any:
    """The same, with the keys of every object in another order."""
    if isinstance(value, dict):
        names = list(value)
        order.shuffle(names)
        return {name: shuffled(value[name], order) for name in names}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def respelt(value: Any) -> Any:
    """The same, with every whole number written the other way, 1 as 1.0 and 1.0 as 1."""
    if isinstance(value, dict):
        return {name: respelt(item) for name, item in value.items()}
    if isinstance(value, list):
        return [respelt(item) for item in value]
    if type(value) is int:
        return float(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT else value


def the_same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(the_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(the_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


# -- the hash of what is asked (S2.9-13) -----------------------------------------------------------------------------


def test_the_hash_is_the_sha256_of_canonical_json_with_the_models_name() -> None:
    canonical = (
        '{"model":"baseline_forecast_v1","parameters":{"horizon_months":24,"region":"AU","scenario":"high_inflation"}}'
    )
    assert FORECAST.payload_hash(ASKED) == hashlib.sha256(canonical.encode()).hexdigest()


@given(parameters, st.randoms(use_true_random=False))
def test_the_order_of_keys_changes_no_hash_at_any_depth(asked: dict[str, Any], order: random.Random) -> None:
    assert ANYTHING.payload_hash(shuffled(asked, order)) == ANYTHING.payload_hash(asked)


@given(parameters)
def test_one_and_one_point_zero_are_the_same_number_in_a_hash(asked: dict[str, Any]) -> None:
    assert ANYTHING.payload_hash(respelt(asked)) == ANYTHING.payload_hash(asked)


@given(parameters)
def test_parameters_hash_as_their_json_does_whatever_its_spaces(asked: dict[str, Any]) -> None:
    expected = ANYTHING.payload_hash(asked)
    assert ANYTHING.payload_hash(ANYTHING.check(asked)) == expected
    assert ANYTHING.payload_hash(json.dumps(asked, indent=3)) == expected


@given(parameters, parameters)
def test_two_questions_have_one_hash_only_if_they_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (ANYTHING.payload_hash(one) == ANYTHING.payload_hash(other)) is the_same(one, other)


@given(parameters, text)
def test_the_name_of_the_model_is_part_of_the_hash(asked: dict[str, Any], suffix: str) -> None:
    other = dataclasses.replace(ANYTHING, name=f"anything else {suffix}")
    assert other.payload_hash(asked) != ANYTHING.payload_hash(asked)


@given(parameters, st.dictionaries(st.sampled_from(["sent_at", "client"]), values))
def test_excluded_parameters_change_no_hash(asked: dict[str, Any], noise: dict[str, Any]) -> None:
    model = make_model("m", anything, isolation="thread", exclude=["sent_at", "client"])
    asked = {name: value for name, value in asked.items() if name not in model.exclude}
    assert model.payload_hash(asked | noise) == model.payload_hash(asked)
    assert make_model("m", anything).payload_hash(asked) == model.payload_hash(asked)


def test_a_name_is_excluded_at_the_top_and_not_inside_a_parameter() -> None:
    model = make_model("m", anything, exclude="client")
    assert model.payload_hash({"a": {"client": 1}}) != model.payload_hash({"a": {"client": 2}})


def test_python_objects_hash_as_the_json_that_they_are_kept_as() -> None:
    asked = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "price": Decimal("1.10"),
        "id": uuid.UUID(int=7),
        "scenario": Scenario.HIGH,
        "region": Region("AU", [1, 2]),
        "tags": {"b", "a", "c"},
        "prices": Prices(base=3),
        "whole": 24.0,
    }
    kept = ANYTHING.check(asked)
    assert json.loads(kept) == {
        "when": "2026-01-02T00:00:00Z",
        "day": "2026-01-02",
        "price": "1.10",
        "id": "00000000-0000-0000-0000-000000000007",
        "scenario": "high_inflation",
        "region": {"name": "AU", "codes": [1, 2], "inside": None},
        "tags": ["a", "b", "c"],
        "prices": {"base": 3},
        "whole": 24,
    }
    assert ANYTHING.payload_hash(asked) == ANYTHING.payload_hash(kept) == ANYTHING.payload_hash(json.loads(kept))


# -- what is checked when a run is submitted -------------------------------------------------------------------------


@given(parameters)
def test_what_was_checked_comes_back_as_it_was(asked: dict[str, Any]) -> None:
    kept = ANYTHING.check(asked)
    assert ANYTHING.bind(kept) == asked == json.loads(kept)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "lacks the parameters 'scenario', 'horizon_months'"),
        ({"scenario": "x"}, "lacks the parameter 'horizon_months'"),
        (ASKED | {"horizon_month": 1}, "takes no parameter 'horizon_month'; did you mean 'horizon_months'?"),
        (ASKED | {"zz": 1}, "takes no parameter 'zz'; it takes scenario, horizon_months, region"),
        (ASKED | {"ctx": 1}, "takes no parameter 'ctx': the context is given by the worker"),
        (ASKED | {"scenario": 7}, "cannot take the parameter 'scenario': expected `str`, got `int`"),
        (ASKED | {"horizon_months": "24"}, "cannot take the parameter 'horizon_months': expected `int`, got `str`"),
        (ASKED | {"horizon_months": 24.5}, "cannot take the parameter 'horizon_months': expected `int`, got `float`"),
        (ASKED | {"horizon_months": True}, "cannot take the parameter 'horizon_months': expected `int`, got `bool`"),
        (ASKED | {"horizon_months": None}, "cannot take the parameter 'horizon_months': expected `int`, got `null`"),
    ],
)
def test_a_wrong_call_is_told_with_the_name_of_the_model_and_of_the_parameter(asked: Any, told: str) -> None:
    with pytest.raises(InvalidParameters) as refused:
        FORECAST.check(asked)
    assert str(refused.value) == f"model 'baseline_forecast_v1' {told}"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (math.nan, r"\$.value is nan"),
        ([1, None, {"a": -math.inf}], r"\$.value\[2\].a is -inf"),
        ("a\0", "'value': it holds the character NUL"),
        ({"a\0": 1}, "'value': it holds the character NUL"),
        ("\ud800", r"\$.value holds half of a surrogate pair"),
        ({"\udfff": 1}, "half of a surrogate pair"),
        (Engine(), r"\$.value: type Engine has no JSON form"),
        ({"engine": [Engine()]}, r"\$.value.engine\[0\]: type Engine has no JSON form"),
        ([10**5000], r"\$.value\[0\]: Exceeds the limit"),
        ("x" * (1 << 20), "up to 1,048,576 bytes"),
        (functools.reduce(lambda inner, _: [inner], range(99), []), "100 levels of nesting"),
        (functools.reduce(lambda inner, _: {"a": inner}, range(20_000), {}), "nested too deep|100 levels of nesting"),
        ([float(n) for n in range(200)] + [math.inf, None], r"\$.value\[200\] is inf"),
    ],
)
def test_what_json_or_a_store_cannot_keep_is_refused_with_its_place(value: Any, told: str) -> None:
    with pytest.raises(InvalidParameters, match=told):
        ANYTHING.check({"value": value})
    with pytest.raises(InvalidParameters, match=told):
        ANYTHING.payload_hash({"value": value})


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidParameters, match="contains itself"):
        ANYTHING.check({"value": circle})


def test_what_only_looks_like_trouble_is_taken() -> None:
    wide = [{"a": [n]} for n in range(500)]
    deep = functools.reduce(lambda inner, _: [inner], range(98), [])
    for value in (["null", None], "\\u0000", "a\\", wide, deep, "nan", 10**4000, "x" * 1_000_000):
        assert ANYTHING.bind(ANYTHING.check({"value": value})) == {"value": value}


@pytest.mark.parametrize("asked", [None, [], "scenario", 7, [("scenario", "x")], {1: 2}, {None: 1}, {b"scenario": 1}])
def test_parameters_that_are_no_mapping_from_names_are_refused(asked: Any) -> None:
    with pytest.raises(InvalidParameters, match=r"mapping of parameters|parameters by name"):
        FORECAST.check(asked)


@pytest.mark.parametrize("kept", ["", "[]", "{", '{"scenario":"x"}', '{"scenario":"x","horizon_months":"y"}', "null"])
def test_json_that_does_not_fit_any_more_is_refused_when_it_is_bound(kept: str) -> None:
    with pytest.raises(InvalidParameters, match="baseline_forecast_v1"):
        FORECAST.bind(kept)


def test_a_whole_number_is_an_int_however_it_is_written() -> None:
    kept = FORECAST.check(ASKED | {"horizon_months": 24.0})
    months = FORECAST.bind(kept)["horizon_months"]
    assert (months, type(months)) == (24, int)
    assert FORECAST.bind('{"horizon_months":2.4e1,"scenario":"x"}') == {"scenario": "x", "horizon_months": 24}


def test_a_float_too_large_to_be_exact_is_no_whole_number() -> None:
    """Its digits and its value differ by then, so it would change its hash on the way to an int."""
    assert FORECAST.bind(FORECAST.check(ASKED | {"horizon_months": -(2.0**53)}))["horizon_months"] == -(2**53)
    with pytest.raises(InvalidParameters, match="'horizon_months': expected `int`, got `float`"):
        FORECAST.check(ASKED | {"horizon_months": 6.687471822243685e16})


def test_whole_numbers_stay_floats_where_nobody_asked_for_an_int() -> None:
    def mixed(count: int, loose: Any, real: float): ...

    model = make_model("mixed", mixed, isolation="thread")
    bound = model.bind(model.check({"count": 2.0, "loose": 3.0, "real": 4}))
    assert bound == {"count": 2, "loose": 3.0, "real": 4.0}
    assert [type(value) for value in bound.values()] == [int, float, float]


def test_bound_values_are_of_the_annotated_types() -> None:
    def typed(
        *,
        when: datetime,
        wait: timedelta,
        price: Decimal,
        run: uuid.UUID,
        scenario: Scenario,
        region: Region,
        table: dict[int, float],
        raw: bytes,
        pair: tuple[int, str],
        prices: Prices,
        late: "Region | None" = None,
    ): ...

    given = {
        "when": datetime(2026, 1, 2, 3, tzinfo=UTC),
        "wait": timedelta(minutes=5),
        "price": Decimal("1.10"),
        "run": uuid.UUID(int=7),
        "scenario": Scenario.LOW,
        "region": Region("AU", [1], Region("NSW")),
        "table": {1: 2.5},
        "raw": b"\x00\xff",
        "pair": (1, "a"),
        "prices": Prices(base=3),
    }
    model = make_model("typed", typed, isolation="thread")
    assert model.bind(model.check(given)) == given
    inside = {"name": "AU", "inside": {"name": "NSW", "codes": [1, 2.5]}}
    with pytest.raises(InvalidParameters, match=r"'region' at .inside.codes\[1\]: expected `int`, got `float`"):
        model.check(given | {"region": inside})
    with pytest.raises(InvalidParameters, match=r"'prices'.*base"):
        model.check(given | {"prices": {"base": "x"}})


def test_limits_in_annotations_are_kept() -> None:
    def limited(share: Annotated[float, msgspec.Meta(ge=0, le=1)], mode: Literal["fast", "exact"] = "fast"): ...

    model = make_model("limited", limited, isolation="thread")
    assert model.bind(model.check({"share": 1})) == {"share": 1.0}
    with pytest.raises(InvalidParameters, match="'share': expected `float` <= 1"):
        model.check({"share": 2})
    with pytest.raises(InvalidParameters, match="'mode': invalid enum value 'slow'"):
        model.check({"share": 0, "mode": "slow"})


def test_an_annotation_that_cannot_be_checked_takes_anything() -> None:
    def loose(*, a: Engine, b: list[Engine], c: "Missing", d: int | Engine, e: 7, f: object, g: complex, h): ...

    given = {name: {"any": [1, "x"]} for name in "abcdefgh"}
    model = make_model("loose", loose, isolation="thread")
    assert model.bind(model.check(given)) == given


def test_one_bad_annotation_leaves_the_others_checked() -> None:
    def half(a: "Missing", b: int): ...

    with pytest.raises(InvalidParameters, match="'b': expected `int`"):
        make_model("half", half, isolation="thread").check({"a": 1, "b": "x"})


def test_names_beyond_the_signature_are_taken_only_by_kwargs_and_of_their_type() -> None:
    def extra(a: int = 1, **rest: int): ...

    model = make_model("extra", extra, isolation="thread")
    assert model.bind(model.check({"b": 2, "c": 3.0, "a": 4.0})) == {"a": 4, "b": 2, "c": 3}
    with pytest.raises(InvalidParameters, match="'b': expected `int`, got `str`"):
        model.check({"b": "x"})


def test_kwargs_do_not_take_the_name_of_the_context() -> None:
    def extra(ctx, **rest): ...

    with pytest.raises(InvalidParameters, match="takes no parameter 'ctx': the context is given by the worker"):
        make_model("extra", extra, isolation="thread").check({"ctx": 1})


def test_what_is_not_given_is_left_to_the_functions_default() -> None:
    def optional(a: int = 1, *, b: list[int] | None = None): ...

    model = make_model("optional", optional, isolation="thread")
    assert model.bind(model.check({})) == {}
    assert model.bind(model.check({"b": None})) == {"b": None}


def test_parameters_may_be_called_as_they_like() -> None:
    def odd(p1: int, self: str, größe: float, __struct_fields__: int): ...  # noqa: PLC2401

    given = {"p1": 1, "self": "x", "größe": 2.5, "__struct_fields__": 3}
    model = make_model("odd", odd, isolation="thread")
    assert model.bind(model.check(given)) == given


def test_a_model_without_parameters_is_checked_in_no_time() -> None:
    """It runs at every submit, thousands of times a second; the bound leaves room for a slow machine."""
    model = make_model("nothing", nothing)
    assert (model.check({}), model.bind("{}")) == ("{}", {})
    best = min(timeit.repeat(lambda: model.check({}), number=1000, repeat=5)) / 1000
    assert best < 5e-6


# -- registration ----------------------------------------------------------------------------------------------------


def positional(a, /): ...
def starred(*a): ...
def yielding():
    yield 1


async def awaited(ctx, x: int): ...
async def streaming():
    yield 1


class Bound:
    def method(self, x: int): ...

    async def __call__(self, x: int): ...


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (nothing, {"retries": 3}, "no option 'retries'; there are: backoff, cost"),
        (nothing, {"max_attempts": 0}, "max_attempts must be a whole number from 1"),
        (nothing, {"max_attempts": 1.5}, "max_attempts must be a whole number"),
        (nothing, {"max_attempts": True}, "max_attempts must be a whole number"),
        (nothing, {"max_lost": -1}, "max_lost must be a whole number from 0"),
        (nothing, {"backoff": ()}, r"backoff must be a tuple of seconds"),
        (nothing, {"backoff": 5}, r"backoff must be a tuple of seconds"),
        (nothing, {"backoff": (5, -1)}, "backoff must be a number, 0 or greater"),
        (nothing, {"backoff": (math.nan,)}, "backoff must be a number"),
        (nothing, {"lease": 0}, "lease must be a number, greater than 0"),
        (nothing, {"lease": math.inf}, "lease must be a number"),
        (nothing, {"timeout": -1}, "timeout must be a number, greater than 0"),
        (nothing, {"timeout": "60"}, "timeout must be a number"),
        (nothing, {"grace": -0.1}, "grace must be a number, 0 or greater"),
        (nothing, {"cost": -1}, "cost must be a number from 0 to 1,000,000, not -1"),
        (nothing, {"priority": 1.5}, "priority must be a whole number"),
        (nothing, {"priority": 2**31}, "priority must be a whole number from"),
        (nothing, {"queue": ""}, "queue must be text that is not empty"),
        (nothing, {"queue": "a\nb"}, "queue has a control character"),
        (nothing, {"fatal": (ValueError, "x")}, "fatal takes types of errors, not 'x'"),
        (nothing, {"exclude": "sent_at"}, "exclude names 'sent_at', which is not a parameter"),
        (nothing, {"exclude": 7}, "exclude takes names of parameters"),
        (nothing, {"summary": "scenario"}, "summary names 'scenario', which is not a parameter"),
        (nothing, {"summary": 7}, "summary takes the name of a parameter"),
        (nothing, {"isolation": "fork"}, "isolation must be one of 'process', 'thread', 'loop', not 'fork'"),
        (nothing, {"isolation": "loop"}, "a sync function would stop the event loop"),
        (awaited, {"isolation": "process"}, "an async function runs in the event loop"),
        (awaited, {"isolation": "thread"}, "an async function runs in the event loop"),
        (Bound(), {"isolation": "thread"}, "an async function runs in the event loop"),
        (positional, {}, "parameters are given by name, which 'a'"),
        (starred, {}, r"parameters are given by name, which '\*a'"),
        (yielding, {}, "a function that yields has no result"),
        (streaming, {}, "a function that yields has no result"),
        (lambda: None, {}, 'it is a lambda.*isolation="thread"'),
        (Bound().method, {}, 'is bound to an object.*isolation="thread"'),
        (functools.partial(forecast, None), {}, 'is a partial without a name.*isolation="thread"'),
        (7, {}, "needs a function, not 7"),
        (None, {}, "needs a function, not None"),
    ],
)
def test_what_could_not_work_is_refused_at_registration(function: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        make_model("m", function, **options)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\0", "a\x7f", "\ud800", None, 7])
def test_a_name_that_cannot_be_kept_or_shown_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="a model's name"):
        make_model(name, nothing)


def test_a_nested_function_must_run_in_a_thread() -> None:
    def nested(x: int): ...

    with pytest.raises(InvalidRequest, match=r'nested lies inside another function.*isolation="thread"'):
        make_model("m", nested)
    model = make_model("m", nested, isolation="thread")
    assert (model.isolation, model.reference, model.main_path) == ("thread", "", None)


def test_a_sync_function_runs_in_a_process_and_an_async_one_in_the_loop() -> None:
    assert make_model("m", nothing).isolation == "process"
    assert make_model("m", awaited).isolation == "loop"
    assert make_model("m", Bound()).isolation == "loop"
    assert make_model("ordre numéro 1", nothing, isolation=None).isolation == "process"


def test_options_are_kept_as_they_were_given() -> None:
    options = {
        "max_attempts": 1,
        "max_lost": 0,
        "backoff": (0.5,),
        "lease": 5,
        "timeout": 2.5,
        "queue": "slow",
        "priority": -3,
        "isolation": "thread",
        "cost": 1.5,
        "fatal": (ValueError,),
        "exclude": frozenset({"region"}),
        "summary": "scenario",
        "grace": 0,
    }
    model = make_model("m", forecast, **options)
    assert {name: getattr(model, name) for name in options} == options
    assert make_model("m", nothing, backoff=[1, 2], fatal=KeyError, timeout=None).fatal == (KeyError,)


def test_the_context_is_known_by_its_name_or_its_type() -> None:
    def by_name(ctx, x: int): ...
    def by_name_alone(ctx, /): ...
    def by_type(context: "semel.runs.execution.context.Context", x: int): ...  # noqa: F821
    def second(x: int, ctx): ...
    def keyword(*, ctx): ...

    def thread(function: Any) -> Model:
        return make_model("m", function, isolation="thread")

    assert thread(by_name).signature.wants_context
    assert thread(by_name_alone).signature.wants_context
    assert thread(by_type).signature.wants_context
    assert not thread(nothing).signature.wants_context
    assert thread(by_type).bind('{"x":1}') == {"x": 1}
    with pytest.raises(InvalidRequest, match="context must be the first parameter"):
        thread(second)
    with pytest.raises(InvalidRequest, match="context is given by position"):
        thread(keyword)


def test_the_context_class_itself_marks_the_context() -> None:
    from semel.runs.execution.context import Context

    def typed(run: Context, x: int): ...

    assert make_model("m", typed, isolation="thread").signature.wants_context


@given(st.integers(0, 20), st.floats(0, 1, exclude_max=True))
def test_the_wait_follows_the_backoff_repeats_its_last_and_is_spread_by_a_tenth(errors: int, chance: float) -> None:
    step = [5, 5, 20, 60][min(errors, 3)]
    assert step <= FORECAST.delay(errors, chance) <= step * 1.1
    assert FORECAST.delay(errors, 0) == step


# -- found again in another process ----------------------------------------------------------------------------------


def ran(*command: str, at: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=at, capture_output=True, text=True, timeout=60, check=False)


def elsewhere(reference: str, main_path: str | None, *, path: Path | None = None) -> Any:
    """What the function gives in a process that knows nothing but where it lies."""
    return outcome(
        """
        import sys
        from semel.runs.models.model import load
        sys.path[:0] = path
        try:
            function = load(reference, main_path)
            again = load(reference, main_path)
            tell((function(2), function.__module__, function is again))
        except ImportError as error:
            tell(str(error))
        """,
        reference=reference,
        main_path=main_path,
        path=[str(path)] if path else [],
    )


PROGRAM = """
    import dataclasses, json
    import neighbour
    from semel.runs.models.model import make_model

    @dataclasses.dataclass
    class Pair:
        x: int

    class Family:
        @staticmethod
        def twice(x: int):
            return neighbour.times(Pair(x).x)

    def plain(x: Pair):
        return neighbour.times(x)

    print("run as", __name__)
    if __name__ == "__main__":
        models = [make_model("m", plain), make_model("m", Family.twice)]
        print(json.dumps([[model.reference, model.main_path] for model in models]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    for folder in (tmp_path, package):
        (folder / "neighbour.py").write_text("def times(x): return 2 * x\n")
    (package / "__init__.py").touch()
    program = textwrap.dedent(PROGRAM)
    (tmp_path / "program").write_text(program)  # a script needs no .py
    (package / "module.py").write_text(program)
    return tmp_path


def test_a_function_of_a_module_is_found_by_its_name() -> None:
    model = make_model("m", nothing)
    assert (model.reference, model.main_path) == (f"{__name__}:nothing", None)
    assert load(model.reference) is nothing


def test_a_function_of_the_main_file_is_found_by_running_it_under_another_name(project: Path) -> None:
    said = ran("program", at=project).stdout.splitlines()
    plain, twice = json.loads(said[-1])
    assert plain == ["__main__:plain", str(project / "program")]
    assert elsewhere(*plain) == (4, MAIN, True)
    assert elsewhere(*twice) == (4, MAIN, True)


def test_a_function_of_a_module_run_with_m_is_found_by_the_modules_name(project: Path) -> None:
    plain, _ = json.loads(ran("-m", "package.module", at=project).stdout.splitlines()[-1])
    assert plain == ["package.module:plain", None]
    assert elsewhere(*plain, path=project) == (4, "package.module", True)


def test_a_function_from_the_command_line_is_refused_for_a_process() -> None:
    code = "from semel.runs.models.model import make_model\ndef f(): ...\nmake_model('m', f)"
    answer = ran("-c", code, at=Path.cwd())
    assert answer.returncode == 1
    assert 'given on the command line. Define it at the top of a module, or pass isolation="thread"' in answer.stderr


def test_the_main_file_registers_the_same_in_the_child_as_in_the_parent(project: Path) -> None:
    program = (
        "from semel.runs.models.model import make_model\ndef plain(x): return make_model('m', plain).reference, {p}"
    )
    (project / "again").write_text(program.format(p="make_model('m', plain).main_path"))
    said, _, _ = elsewhere("__main__:plain", str(project / "again"))
    assert said == (f"{MAIN}:plain", str(project / "again"))


@pytest.mark.parametrize(
    ("reference", "program", "told"),
    [
        ("no.such.module:f", None, "No module named 'no'"),
        ("json:no_such_function", None, "no attribute 'no_such_function'"),
        ("__main__:f", "raise RuntimeError('cannot start')", "RuntimeError: cannot start"),
        ("__main__:f", "import sys; sys.exit(3)", "SystemExit: 3"),
        ("__main__:f", "def f(:", "SyntaxError"),
        ("__main__:f", "", "no attribute 'f'"),
    ],
)
def test_a_model_that_cannot_be_imported_says_why(
    reference: str, program: str | None, told: str, tmp_path: Path
) -> None:
    main_path = None
    if program is not None:
        main_path = str(tmp_path / "broken.py")
        Path(main_path).write_text(program)
    said = elsewhere(reference, main_path)
    assert said.startswith(f"cannot import model {reference!r}")
    assert told in said


def test_a_main_file_that_failed_is_run_again_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """Half of it must not pass for all of it: it could not reach its database, and now it can."""
    ready = tmp_path / "ready"
    (tmp_path / "late.py").write_text(f"def f(x): return times * x\nopen({str(ready)!r}).close()\ntimes = 2\n")
    with Program(
        """
        from semel.runs.models.model import load
        for _ in range(2):
            try:
                tell(load("__main__:f", path)(2))
            except ImportError as error:
                tell(str(error))
            hear()
        """,
        path=str(tmp_path / "late.py"),
    ) as program:
        assert "No such file" in program.hear()
        ready.touch()
        program.tell()
        assert program.hear() == 4


def test_a_main_file_that_is_gone_is_told(tmp_path: Path) -> None:
    assert "FileNotFoundError" in elsewhere("__main__:f", str(tmp_path / "gone.py"))
