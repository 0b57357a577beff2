"""Renders a type as source code, each name without its module, whatever way the type was written."""

import ast
import functools
import importlib
import inspect
import types
import typing
from typing import Any, ForwardRef, ParamSpec, TypeVar, Union, get_args, get_origin


def plain(value: Any) -> str:
    """The annotation as text: ``Optional[a.B]``, ``'B | None'`` and ``B | None`` are all ``B | None``."""
    text = value.strip() if isinstance(value, str) else _written(value)
    return ast.unparse(_Plain().visit(ast.parse(text, mode="eval")))


def is_ours(value: Any) -> bool:
    """Whether semel defines it."""
    return str(getattr(value, "__module__", "")).split(".", 1)[0] == "semel"


def _written(value: Any) -> str:
    if isinstance(value, ForwardRef):
        return value.__forward_arg__
    if isinstance(value, str):
        return value
    if value is None or value is type(None):
        return "None"
    if value is Ellipsis:
        return "..."
    if isinstance(value, list | tuple):  # the parameters of a Callable
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, TypeVar | ParamSpec):
        return value.__name__
    return _written_generic(value)


def _written_generic(value: Any) -> str:
    origin, arguments = get_origin(value), get_args(value)
    if origin is None:
        return str(getattr(value, "__name__", None) or getattr(value, "_name", None) or repr(value))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_written, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is typing.Annotated:
        return _written(arguments[0])
    name = getattr(value, "__name__", None) or getattr(origin, "__name__", None) or str(origin)
    return f"{name}[{', '.join(map(_written, arguments)) or '()'}]"


class _Plain(ast.NodeTransformer):
    """Takes modules and quotes away, and writes Optional and Union as ``|``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.attr in ("args", "kwargs"):
            return node  # P.args
        return ast.Name(node.attr, ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            found: ast.expr = self.visit(ast.parse(node.value, mode="eval").body)
            return found
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        name = ast.unparse(node.value).rpartition(".")[2]
        if name == "Literal":
            return ast.Subscript(ast.Name("Literal", ast.Load()), node.slice, ast.Load())
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Annotated":
            first: ast.expr = self.visit(parts[0])
            return first
        if name in ("Optional", "Union"):
            united: list[ast.expr] = [self.visit(each) for each in parts]
            if name == "Optional":
                united.append(ast.Constant(None))
            whole = united[0]
            for each in united[1:]:
                whole = ast.BinOp(whole, ast.BitOr(), each)
            return whole
        found = self.generic_visit(node)
        assert isinstance(found, ast.expr)
        return found


def names_in(text: str) -> set[str]:
    """The names that a rendered annotation uses; what Literal holds are values."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(text, mode="eval")]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return found


def meaning(name: str, module: types.ModuleType) -> tuple[Any, types.ModuleType]:
    """What the name means in the module, and the module of semel that defines it.

    The module may import the name for type checkers only. None: nobody knows it.
    """
    origin = _imports(module).get(name)
    if origin is not None and origin[0].split(".", 1)[0] == "semel":
        home, original = importlib.import_module(origin[0]), origin[1]
        return (getattr(home, original), home) if home is module else meaning(original, home)
    if origin is not None:
        return getattr(importlib.import_module(origin[0]), origin[1]), module
    return getattr(module, name, None), module


@functools.cache
def _imports(module: types.ModuleType) -> dict[str, tuple[str, str]]:
    """Where the module has its names from: module and name there, by the name here."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    return found


def is_alias_of_ours(name: str, value: Any) -> bool:
    """Whether it stands for another type, and is neither a type variable nor a word of typing."""
    if inspect.isclass(value):
        return value.__name__ != name and value.__module__ == "builtins" and not hasattr(typing, name)
    if value is None or isinstance(value, TypeVar | ParamSpec) or inspect.ismodule(value):
        return False
    return not hasattr(typing, name) and (isinstance(value, str) or get_origin(value) is not None)
