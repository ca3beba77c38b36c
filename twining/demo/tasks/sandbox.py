"""Run a small generated Python function in this process without trusting it.

The source is parsed, every node must be on a short allow list (no imports, no private names, no
attribute outside a list of plain methods), multiplication and powers go through size checks, and
the run is counted in bytecodes, so a loop that never ends stops at a fixed, machine-independent
point. Good enough for answers of a small model; it is not a security boundary against an attacker.
"""

import ast
import copy
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

MAX_SOURCE = 4000  # characters
MAX_OPCODES = 50_000
MAX_SIZE = 2_000  # items or characters of any one value; with MAX_OPCODES it bounds memory
MAX_INT = 10**40

_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.For, ast.While,
    ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BoolOp, ast.BinOp, ast.UnaryOp,
    ast.Lambda, ast.IfExp,
    ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Compare,
    ast.Call, ast.keyword,
    ast.Constant, ast.Attribute, ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple,
    ast.Slice, ast.Load,
    ast.Store, ast.comprehension, ast.And, ast.Or, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod,
    ast.Pow,
    ast.FloorDiv, ast.Not, ast.USub, ast.UAdd, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.Is, ast.IsNot,
    ast.In, ast.NotIn,
)  # fmt: skip
_METHODS = frozenset(
    [
        "append",
        "count",
        "endswith",
        "extend",
        "find",
        "get",
        "index",
        "insert",
        "isalpha",
        "isdigit",
        "islower",
        "isspace",
        "isupper",
        "items",
        "join",
        "keys",
        "lower",
        "lstrip",
        "pop",
        "remove",
        "replace",
        "reverse",
        "rstrip",
        "sort",
        "split",
        "startswith",
        "strip",
        "title",
        "capitalize",
        "upper",
        "values",
        "copy",
        "add",
    ]
)


class SandboxError(Exception):
    """No result: bad syntax, a forbidden construct, an exception, or a limit was passed."""


def _sized(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise SandboxError("integer too large")
    if isinstance(value, str | list | tuple | dict | set) and len(value) > MAX_SIZE:
        raise SandboxError("value too large")
    return value


def _mul(a: Any, b: Any) -> Any:
    for seq, times in ((a, b), (b, a)):
        if (
            isinstance(seq, str | list | tuple)
            and isinstance(times, int)
            and len(seq) * times > MAX_SIZE
        ):
            raise SandboxError("repetition too large")
    return _sized(a * b)


def _pow(a: Any, b: Any) -> Any:
    if not isinstance(b, int | float) or abs(b) > 100 or not isinstance(a, int | float):
        raise SandboxError("power too large")
    return _sized(_sized(a) ** b)


def _add(a: Any, b: Any) -> Any:
    return _sized(a + b)


def _mod(a: Any, b: Any) -> Any:
    if isinstance(a, str):
        raise SandboxError("text formatting is not allowed")
    return a % b


def _sum(values: Any, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SandboxError("sum of sequences is not allowed")
    return sum(values, start)


def _replace(text: Any, old: Any, new: Any) -> Any:
    if text.count(old) * len(new) > MAX_SIZE:
        raise SandboxError("value too large")
    return text.replace(old, new)


def _join(text: Any, parts: Any) -> Any:
    kept = list(parts)
    if sum(len(part) + len(text) for part in kept) > MAX_SIZE:
        raise SandboxError("value too large")
    return text.join(kept)


def _extend(values: Any, more: Any) -> None:
    kept = list(more)
    if len(values) + len(kept) > MAX_SIZE:
        raise SandboxError("value too large")
    values.extend(kept)


def _range(*args: int) -> range:
    made = range(*args)
    if len(made) > MAX_SIZE:
        raise SandboxError("range too large")
    return made


_GUARDS: dict[type[ast.operator], str] = {
    ast.Mult: "_guard_mul", ast.Pow: "_guard_pow", ast.Add: "_guard_add", ast.Mod: "_guard_mod",
}  # fmt: skip
# Methods whose result can be much larger than what goes in.
_GROWING = {"replace": _replace, "join": _join, "extend": _extend}
_BUILTINS: dict[str, Any] = {
    **{f.__name__: f for f in (abs, all, any, bool, dict, divmod, enumerate, float, int, isinstance,
       len, list, max, min, reversed, round, set, sorted, str, tuple, zip)},
    **{f"_guard_{name}": guard for name, guard in _GROWING.items()},
    "range": _range, "sum": _sum,
    "_guard_mul": _mul, "_guard_pow": _pow, "_guard_add": _add, "_guard_mod": _mod,
}  # fmt: skip


def _guarded(guard: str, args: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(guard, ast.Load()), args, [])


class _Guard(ast.NodeTransformer):
    """Checks every node and routes growing operators through the guards."""

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, _NODES):
            raise SandboxError(f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            raise SandboxError(f"attribute {node.attr} is not allowed")
        if isinstance(node, ast.Attribute) and node.attr in _GROWING:
            raise SandboxError(f"{node.attr} must be called directly")
        is_store = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        if is_store and (is_slice or isinstance(node, ast.Attribute)):
            raise SandboxError("this assignment is not allowed")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise SandboxError(f"name {node.id} is not allowed")
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            raise SandboxError("decorators are not allowed")
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            _sized(node.value)
        return super().visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        func = node.func
        if not isinstance(func, ast.Attribute) or func.attr not in _GROWING:
            return self.generic_visit(node)
        if node.keywords:
            raise SandboxError(f"{func.attr} takes no keywords here")
        args = [self.visit(arg) for arg in (func.value, *node.args)]
        return _guarded(f"_guard_{func.attr}", args)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        guard = _GUARDS.get(type(node.op))
        return _guarded(guard, [node.left, node.right]) if guard else node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        guard = _GUARDS.get(type(node.op))
        if guard is None:
            return node
        before = copy.deepcopy(node.target)
        before.ctx = ast.Load()
        return ast.Assign([node.target], _guarded(guard, [before, node.value]))


def _compile(source: str) -> CodeType:
    if len(source) > MAX_SOURCE:
        raise SandboxError("source too long")
    try:
        tree = _Guard().visit(ast.parse(source))
        return compile(ast.fix_missing_locations(tree), "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise SandboxError(f"does not compile: {err}") from err


def _counted(run: Callable[[], Any]) -> Any:
    """Call `run`; raise SandboxError after MAX_OPCODES bytecodes of the answer's own code."""
    left = MAX_OPCODES

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<answer>":
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            raise SandboxError("too many steps")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)


def run_function(source: str, name: str, args: tuple[Any, ...]) -> Any:
    """Define the functions and call `name(*args)`; SandboxError when that gives no result."""
    code = _compile(source)
    scope: dict[str, Any] = {"__builtins__": dict(_BUILTINS)}

    def run() -> Any:
        exec(code, scope)
        function = scope.get(name)
        if not callable(function):
            raise SandboxError(f"{name} is not defined")
        return function(*copy.deepcopy(args))

    try:
        return _counted(run)
    except SandboxError:
        raise
    except Exception as err:  # whatever the answer's own code raises
        raise SandboxError(f"{type(err).__name__}: {err}") from err
