"""What a return annotation names is stored and replayed as that type; what can never be stored is refused at once."""

from __future__ import annotations

import ast
import asyncio
import enum
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property, partial, wraps
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NoReturn,
    Optional,
    Protocol,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID

import msgspec
import pydantic
import pytest

from semel import (
    AsyncOnce,
    Granted,
    IdempotentProcessor,
    InvalidRequest,
    Once,
    OutcomeGone,
    Unencodable,
    codec,
    current_claim,
)
from semel.once.return_types import codec_of

if TYPE_CHECKING:
    from fractions import Fraction

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass
class Item:
    sku: str
    price: Decimal
    colors: set[Color] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Order:
    made_of: ClassVar[str] = "items"
    id: UUID
    items: list[Item]
    due: date | None = None
    parent: Order | None = None


@dataclass
class Checked:
    cents: int
    euros: int = field(init=False)

    def __post_init__(self) -> None:
        self.euros = self.cents // 100
        self.cents += 1

    @cached_property
    def text(self) -> str:
        return f"{self.cents}"


@dataclass
class Money:
    cents: Decimal
    level: Level
    at: Path


@dataclass
class Page(Generic[T]):
    rows: list[T]


class Point(NamedTuple):
    x: int
    at: Level


class Struct(msgspec.Struct, frozen=True, kw_only=True, tag="s"):
    order: Order
    note: str | msgspec.UnsetType = msgspec.UNSET


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    id: UUID
    home: pydantic.HttpUrl
    parts: dict[Level, Item | None] = {}
    child: Model | None = None
    _seen: int = pydantic.PrivateAttr(default=0)


class Names(pydantic.RootModel[list[str]]):
    pass


class Row(TypedDict):
    item: Item


class Shape(Protocol):
    def area(self) -> float: ...


OrderId = NewType("OrderId", UUID)
ID = UUID(int=7)
ITEM = Item("a", Decimal("1.10"), {Color.RED, Color.BLUE})
ORDER = Order(ID, [ITEM], date(2024, 2, 29), Order(UUID(int=8), []))
CHECKED = Checked(990)
MODEL = Model(
    id=ID, home="https://example.org/a", parts={Level.LOW: ITEM}, more=(1, 2), child={"id": ID, "home": "http://b"}
)  # type: ignore[arg-type,call-arg]  # pydantic converts
MODEL._seen = 3

RETURNED: list[tuple[Any, Any]] = [
    (Item, ITEM),
    (Order, ORDER),
    (Optional[Order], None),  # noqa: UP045 -- as many write it
    (Order | None, ORDER),
    (Union[Order, Item, int], ITEM),  # noqa: UP007 -- as many write it
    (Item | Order | int, 5),
    (float | Item, 5),
    (list[Order], [ORDER, ORDER]),
    (dict[UUID, tuple[Item, ...]], {ID: (ITEM, ITEM)}),
    (Sequence[Item], (ITEM,)),
    (Mapping[str, Item], {"a": ITEM}),
    (set[Color], {Color.RED}),
    (frozenset[Point], frozenset({Point(1, Level.LOW)})),
    (Color, Color.BLUE),
    (Literal[Color.RED, "none"], Color.RED),
    (Rights, Rights.READ | Rights.WRITE),
    (Level, Level.LOW),
    (Point, Point(1, Level.LOW)),
    (Struct, Struct(order=ORDER)),
    (Struct, Struct(order=ORDER, note="n")),
    (Model, MODEL),
    (list[Model | Struct], [MODEL, Struct(order=ORDER)]),
    (Names, Names(["a"])),
    (Page[Item], Page([ITEM])),
    (Row, {"item": ITEM}),
    (Annotated[Item, "kept"], ITEM),
    (Annotated[Item, threading.Thread], ITEM),
    (OrderId, OrderId(ID)),
    (Checked, CHECKED),
    (Path, Path("/tmp/x")),
    (list[Path | PurePosixPath | PureWindowsPath], [Path("a"), PurePosixPath("b/c"), PureWindowsPath("c:\\d")]),
    (datetime, datetime(2024, 1, 1, tzinfo=UTC)),
    (tuple[time, timedelta, date], (time(1, 2), timedelta(1), date(2024, 1, 1))),
    (Any, [1, (2,)]),
    (object, "x"),
    (Shape, 1),
    (dict, {"a": (1, 2)}),
    (T, 1),
    (NoReturn, None),
]


def returning(hint: Any, value: Any) -> Callable[[], Any]:
    def work() -> Any:
        return value

    work.__annotations__["return"] = hint
    return work


@pytest.mark.parametrize(("hint", "value"), RETURNED)
def test_a_value_replays_as_what_the_annotation_names(hint: Any, value: Any) -> None:
    once = Once("memory://")
    guarded = once.guard(scope="typed", key=lambda: "key")(returning(hint, value))
    first, second = guarded.call(), guarded.call()
    assert first.value is value
    assert second.replayed
    assert type(second.value) is type(value)
    assert second.value == value
    assert sorted(repr(second.value)) == sorted(repr(value))  # a set tells its members in any order


def test_what_was_computed_is_not_computed_again() -> None:
    """An object is made of its fields as they were: ``__post_init__`` would change them once more."""
    once = Once("memory://")
    assert CHECKED.text == "991"
    for _ in range(2):
        value = once.call("key", returning(Checked, CHECKED)).value
        assert (value.cents, value.euros, value.text) == (991, 9, "991")


def test_pydantics_other_state_is_kept() -> None:
    once = Once("memory://")
    again = [once.call("key", returning(Model, MODEL)).value for _ in range(2)][1]
    assert (again._seen, again.model_extra, again.model_fields_set) == (3, {"more": (1, 2)}, MODEL.model_fields_set)
    assert again.model_dump(exclude_unset=True) == MODEL.model_dump(exclude_unset=True)


def test_who_does_not_know_the_class_reads_plain_data() -> None:
    """A class is never looked up by what stands in the database."""
    for hint, value, plain in (
        (Item, Item("a", Decimal(1), {Color.RED}), {"sku": "a", "price": Decimal(1), "colors": {"red"}}),
        (Level, Level.LOW, 1),
        (Point, Point(1, Level.LOW), (1, 1)),
        (Names, Names(["a"]), {"root": ["a"]}),
        (Struct, Struct(order=Order(ID, [])), {"order": {"id": ID, "items": [], "due": None, "parent": None}}),
    ):
        known = codec_of(returning(hint, value))
        assert known is not None
        assert codec.decode(known.encode(value)) == plain


class Shop:
    def sell(self, sku: str) -> Item:
        return Item(sku, Decimal(1))

    async def send(self, sku: str) -> Item:
        return Item(sku, Decimal(2))

    def __call__(self, payload: str) -> Item:
        return Item(payload, Decimal(3))


def test_methods_partials_decorated_functions_and_objects_have_their_annotations() -> None:
    def decorated(function: Callable[[str], Item]) -> Callable[[str], Item]:
        @wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args)

        return inner

    shop, once = Shop(), Once("memory://")
    for _ in range(2):
        assert once.call("method", partial(shop.sell, "a")).value == Item("a", Decimal(1))
        assert once.call("decorated", partial(decorated(shop.sell), "b")).value == Item("b", Decimal(1))
    processor = IdempotentProcessor(shop, once)
    assert [processor.process("c").result for _ in range(2)] == [Item("c", Decimal(3))] * 2


def test_a_class_is_called_for_its_objects_whatever_its_metaclass_returns() -> None:
    class Counting(type):
        def __call__(cls, *args: Any) -> Secretive:
            return super().__call__(*args)

    class Number(int, metaclass=Counting):
        pass

    assert codec_of(Number) is codec_of(int) is codec_of(len) is codec.PLAIN


def test_async_functions_have_the_annotations_of_what_is_awaited() -> None:
    shop = Shop()

    def soon() -> Awaitable[Item]:
        return shop.send("e")

    async def scenario() -> None:
        async with AsyncOnce("memory://") as once:
            guarded = once.guard(key=lambda sku: sku)(shop.send)
            for _ in range(2):
                assert await guarded("d") == Item("d", Decimal(2))
                assert (await once.call("e", soon)).value == Item("e", Decimal(2))

    asyncio.run(scenario())


def test_a_class_of_the_functions_own_surroundings_is_known() -> None:
    @dataclass
    class Inner:
        n: int

    @dataclass
    class Local:
        inner: Inner

    def work() -> Local:
        return Local(Inner(1))

    once = Once("memory://")
    guarded = once.guard(key=lambda: "key")(work)
    assert [guarded(), guarded()] == [Local(Inner(1))] * 2


def test_a_class_that_is_defined_after_the_function_is_known_when_it_is_called() -> None:
    def work() -> Later:  # noqa: F821 -- defined below, as in a module
        return work.__globals__["Later"](1)

    guarded = Once("memory://").guard(key=lambda: "key")(work)
    globals()["Later"] = msgspec.defstruct("Later", [("n", int)])
    try:
        assert guarded() == guarded()
        assert type(guarded()) is globals()["Later"]
    finally:
        del globals()["Later"]


def test_a_name_that_only_type_checkers_know_says_nothing() -> None:
    def plain() -> Fraction:
        return 1  # type: ignore[return-value]  # what matters is that it can be stored

    guarded = Once("memory://").guard(key=lambda: "key")(plain)
    assert [guarded(), guarded()] == [1, 1]


class Secretive:
    pass


class Remembered:
    thread: threading.Thread


@dataclass
class Remembering(Remembered):
    """Inherits an annotation that is no field."""

    n: int


@dataclass
class Partly:
    """Names a class that only type checkers know."""

    n: Fraction


class Shared(msgspec.Struct):
    lock: ClassVar[threading.Thread | None] = None
    n: int = 0


@pytest.mark.parametrize("value", [Remembering(1), Partly(2), Shared(3)])  # type: ignore[arg-type]
def test_only_what_is_stored_of_an_object_must_be_known(value: Any) -> None:
    guarded = Once("memory://").guard(scope="s", key=lambda: "key")(returning(type(value), value))
    assert [guarded(), guarded()] == [value, value]


def test_only_what_is_awaited_of_a_coroutine_is_stored() -> None:
    assert codec_of(returning(Coroutine[threading.Thread, threading.Thread, Item], None)) is not codec.PLAIN


def test_a_class_is_stored_by_its_own_name_and_by_that_of_its_module_where_two_have_the_same() -> None:
    found = codec_of(returning(Order, ORDER))
    assert found is not None
    assert b"test_return_types" not in found.encode(ORDER)
    one, two = (dataclass(type("Same", (), {"__annotations__": {"n": int}, "__module__": name})) for name in "ab")
    guarded = Once("memory://").guard(scope="s", key=lambda: "key")(returning(list[one | two], [one(1), two(2)]))
    assert [type(each) for each in guarded()] == [type(each) for each in guarded()] == [one, two]


@dataclass
class Holder:
    thread: threading.Thread


@dataclass
class Failure(Exception):
    code: int


class Pair(tuple[int, int]):
    __slots__ = ()


class Strange(enum.Enum):
    LOCK = threading.Lock()


REFUSED: list[tuple[Any, str]] = [
    (Secretive, "Secretive"),
    (list[Secretive], "Secretive"),
    (Secretive | None, "Secretive"),
    (dict[str, tuple[int, Secretive]], "Secretive"),
    (Holder, r"Holder\.thread"),
    (list[Page[Holder]], r"Holder\.thread"),
    (Failure, "Failure"),
    (Strange, r"Strange\.LOCK"),
    (Iterator[int], "Iterator"),
    (Generator[int, None, None], "Generator"),
    (Callable[[], int], "Callable"),
    (type[Item], "type"),
    (deque[int], "deque"),
    (Exception, "Exception"),
    (memoryview, "memoryview"),
    (Pair, "Pair"),
    (ast.AST, "AST"),
]


@pytest.mark.parametrize(("hint", "named"), REFUSED)
def test_an_annotation_that_can_never_be_stored_is_refused(hint: Any, named: str) -> None:
    once = Once("memory://")
    for decorate in (once.guard, once.guard(scope="s"), lambda work: once.call("key", work)):
        with pytest.raises(InvalidRequest, match=f"{named}.*can never be stored"):
            decorate(returning(hint, None))
    assert once.get("key") is None


def test_what_a_consumer_returns_is_not_stored_so_it_may_be_anything() -> None:
    @Once("memory://").consumer("type", key=lambda message: message)
    def handle(message: str) -> Secretive:
        return Secretive()

    assert isinstance(handle("m"), Secretive)
    assert handle.call("m").replayed


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Item, type("Special", (Item,), {})("a", Decimal(1))),
        (dict, {"item": ITEM}),
        (Shape, ITEM),
        (Model, Model.model_construct(id=Secretive(), home="https://a")),
    ],
)
def test_another_type_than_the_annotation_names_is_not_stored_as_if_it_were_that(hint: Any, value: Any) -> None:
    once = Once("memory://")
    with pytest.raises(Unencodable):
        once.call("key", returning(hint, value))
    with pytest.raises(OutcomeGone):
        once.call("key", returning(hint, value))


def test_what_is_in_an_object_beside_its_fields_is_not_dropped_silently() -> None:
    item = Item("a", Decimal(1))
    item.bought_by = "ann"  # type: ignore[attr-defined]  # what this is about
    with pytest.raises(Unencodable, match="'bought_by', which is none of its fields"):
        Once("memory://").call("key", returning(Item, item))


def test_a_secret_that_shows_itself_to_nobody_is_not_stored() -> None:
    class Account(pydantic.BaseModel):
        password: pydantic.SecretStr

    once = Once("memory://")
    with pytest.raises(Unencodable, match="SecretStr"):
        once.call("key", returning(Account, Account(password=pydantic.SecretStr("x"))))


def test_a_class_that_raises_while_it_is_looked_at_does_not_repeat_the_work() -> None:
    @dataclass
    class Moody:
        n: int

        def __getattribute__(self, name: str) -> Any:
            if name == "n":
                raise RuntimeError("not now")
            return super().__getattribute__(name)

    once, ran = Once("memory://"), []

    def work() -> Moody:
        ran.append(1)
        return Moody.__new__(Moody)

    with pytest.raises(Unencodable, match="not now"):
        once.call("key", work)
    with pytest.raises(OutcomeGone, match="not now"):
        once.call("key", work)
    assert ran == [1]


def test_a_value_that_is_too_large_for_a_store_does_not_repeat_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "LARGEST", 1000)
    once = Once("memory://")
    with pytest.raises(Unencodable, match="at most 1000 can be stored"):
        once.call("key", lambda: b"x" * 1001)
    with pytest.raises(OutcomeGone):
        once.call("key", lambda: b"")


def struct(name: str, **fields: Any) -> Any:
    """A class with these fields: ``...`` is required, ``list`` makes a new list, and the rest are defaults."""
    made = {list: msgspec.field(default_factory=list)}
    given = [(each, Any) if value is ... else (each, Any, made.get(value, value)) for each, value in fields.items()]
    return msgspec.defstruct(name, given)


def a_dataclass(name: str, **fields: Any) -> Any:
    made = {list: field(default_factory=list)}
    given = [(each, Any) if value is ... else (each, Any, made.get(value, value)) for each, value in fields.items()]
    return make_dataclass(name, given)


def model(name: str, **fields: Any) -> Any:
    made = {list: pydantic.Field(default_factory=list)}
    return pydantic.create_model(name, **{each: (Any, made.get(value, value)) for each, value in fields.items()})


@pytest.mark.parametrize("made", [struct, a_dataclass, model])
def test_a_class_that_has_changed_since_takes_what_still_fits(made: Callable[..., Any]) -> None:
    """New fields have their defaults, old ones are dropped; what cannot be made is an error, and never done again."""
    once = Once("memory://")
    old = made("Thing", a=..., b=...)
    once.call("key", returning(old, old(a=1, b=2)))
    new = made("Thing", a=..., c=3, d=list)
    again = once.call("key", returning(new, None)).value
    assert (type(again), again.a, again.c, again.d, hasattr(again, "b")) == (new, 1, 3, [], False)
    for other in (made("Thing", z=...), made("Renamed", a=...)):
        with pytest.raises(OutcomeGone, match="a Thing, does not fit what the function returns now"):
            once.call("key", returning(other, None))


def test_a_claim_completed_inside_the_function_keeps_its_type() -> None:
    """As in the user's own transaction: the guard finds it done, and later callers get what it annotates."""
    once = Once("memory://")

    @once.guard(scope="inside", key=lambda: "key")
    def work() -> Item:
        once.complete(current_claim(), ITEM)
        return ITEM

    assert [work(), work()] == [ITEM, ITEM]
    verdict = once.claim("elsewhere")
    assert isinstance(verdict, Granted)
    with pytest.raises(Unencodable):
        once.complete(verdict.claim, ITEM)


@pytest.mark.parametrize(
    ("hint", "given", "value"),
    [
        (Money, {"cents": "1.5", "level": 1, "at": "/x"}, Money(Decimal("1.5"), Level.LOW, Path("/x"))),
        (list[Level], [1], [Level.LOW]),
        (Money | None, None, None),
        (Names, ["a"], Names(["a"])),
        (Point, ["7", 1], Point(7, Level.LOW)),
        (dict, {"a": 1}, {"a": 1}),
    ],
)
def test_what_an_operator_resolves_with_becomes_what_the_function_returns(hint: Any, given: Any, value: Any) -> None:
    once = Once("memory://")
    once.claim("key", lease=1e-6, on_crash="unknown")
    once.resolve("key", done=True, value=given)
    assert once.call("key", returning(hint, None)).value == value


@pytest.mark.parametrize(
    ("hint", "given", "why"),
    [
        (Money, {"cents": 1}, "level"),
        (dict[Level, Annotated[int, msgspec.Meta(ge=0)]], {1: -1}, ">= 0"),
        (dict[Level, Shape], {1: 5}, "a Shape cannot be made of plain data"),
    ],
)
def test_what_an_operator_resolves_with_must_fit(hint: Any, given: Any, why: str) -> None:
    once = Once("memory://")
    once.claim("key", lease=1e-6, on_crash="unknown")
    once.resolve("key", done=True, value=given)
    with pytest.raises(OutcomeGone, match=f"resolved with does not fit.*{why}"):
        once.call("key", returning(hint, None))
