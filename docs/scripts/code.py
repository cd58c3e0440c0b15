"""What the code says, read from its syntax trees: reasons of bad samples, and the sentences of errors.

Enters: the package's files. Leaves: `reasons()` and `messages()`, for pages and for the tests that compare them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from docs.scripts.links import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PACKAGE: Final = ROOT / "vlm_stream"
STAGES: Final = ("convert", "read", "decode", "encode", "fit", "kept")
_CODE: Final = re.compile(r"[a-z][a-z0-9_]+")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("testing/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def _parameters(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each function, method and dataclass with the names of what it takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            init = [each for each in node.body if isinstance(each, _Function) and each.name == "__init__"]
            given = [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            yield node.name, [a.arg for a in init[0].args.args[1:]] if init else given
        elif isinstance(node, _Function):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.name, names[1:] if names[:1] in (["self"], ["cls"]) else names


def _texts(node: ast.expr | None, function: ast.AST) -> Iterator[str]:
    """Yield the texts that an expression can be, through choices and names that the function sets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, function)
        yield from _texts(node.orelse, function)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _texts(value, function)
    elif isinstance(node, ast.Name):
        for each in ast.walk(function):
            if isinstance(each, ast.Assign):
                for target in each.targets:
                    yield from _assigned(target, each.value, node.id, function)


def _assigned(target: ast.expr, value: ast.expr, name: str, function: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name) and target.id == name and not isinstance(value, ast.Name):
        yield from _texts(value, function)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts, strict=False):
            yield from _assigned(inner, part, name, function)


def _argument(call: ast.Call, names: list[str], wanted: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == wanted:
            return keyword.value
    place = names.index(wanted)
    return call.args[place] if place < len(call.args) and not isinstance(call.args[place], ast.Starred) else None


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


@cache
def reasons() -> dict[str, set[str]]:
    """Return every reason that a ledger can hold, with the files that give it.

    A reason is a text that is passed as the parameter `reason` of anything that has one.
    """
    takers: dict[str, list[list[str]]] = defaultdict(list)
    trees = list(_trees())
    for _, tree in trees:
        for name, names in _parameters(tree):
            if "reason" in names:
                takers[name].append(names)
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees:
        for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, _Function))]:
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                for names in takers.get(_called(call), ()):
                    for text in _texts(_argument(call, names, "reason"), function):
                        if _CODE.fullmatch(text):
                            found[text].add(file)
        for text in _listed(tree):
            found[text].add(file)
    return dict(found)


def _listed(tree: ast.Module) -> Iterator[str]:
    """Yield the reasons of tuples (stage, reason, fact), and the kinds of problems that `verify` finds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple):
            texts = [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if len(texts) == 3 and texts[0] in STAGES and _CODE.fullmatch(texts[1]):
                yield texts[1]
        elif isinstance(node, ast.Call) and _called(node) == "Problem":
            yield from (
                each.value.value
                for each in node.keywords
                if each.arg == "kind" and isinstance(each.value, ast.Constant)
            )


class Message(NamedTuple):
    """One sentence that the package raises."""

    kind: str
    text: str
    """Empty: it is put together where trees do not tell."""
    file: str
    function: str


@cache
def messages() -> tuple[Message, ...]:
    """Return the sentences of every error of the package that is made, with what is filled in as `{name}`.

    Texts are followed through choices, the names of a function and of its module, and what functions of the package
    return. A parameter is followed to the calls of its function.
    """
    from vlm_stream import errors

    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} - {_OWN_SENTENCE}
    package = _Package(dict(_trees()))
    found: dict[Message, None] = {}

    def note(kind: str, text: ast.expr, file: str, scope: ast.AST, ending: str = "") -> None:
        texts = [each for each in package.texts(text, _Scope(file, scope)) if " " in each.strip()]
        for each in texts or [""]:
            found[Message(kind, each and f"{each.strip()}{ending}", file, getattr(scope, "name", ""))] = None

    for file, tree in package.trees.items():
        for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, _Function))]:
            for call in _own_calls(scope):
                if not call.args:
                    continue
                if _called(call) in kinds:
                    note(_called(call), call.args[-1], file, scope)
                elif _called(call) == "blame_sample" and len(call.args) == 4:
                    note("BadSampleError", call.args[3], file, scope, " ({error}).")
                elif _called(call) == "__init__" and _class_of(tree, scope) == _OWN_SENTENCE:
                    note(_OWN_SENTENCE, call.args[0], file, scope)
    return tuple(found)


_OWN_SENTENCE: Final = "MissingExtraError"
"""An error that is made of names, and puts the sentence together itself."""


def _class_of(tree: ast.Module, function: ast.AST) -> str:
    return next((each.name for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and function in each.body), "")


class _Scope(NamedTuple):
    """Where an expression stands: a function, or the module itself."""

    file: str
    node: ast.AST


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a function or module, and not in functions inside of it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _Function):
            waiting = [*ast.iter_child_nodes(node), *waiting]


def _own_calls(scope: ast.AST) -> Iterator[ast.Call]:
    return (node for node in _own_nodes(scope) if isinstance(node, ast.Call))


_DEPTH: Final = 6
_MOST: Final = 24
"""Texts of one expression; the rest is filled in as `{name}`."""


class _Package:
    """Follows texts through the package."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.trees = trees
        self.functions: dict[str, list[_Scope]] = defaultdict(list)
        self.calls: dict[str, list[tuple[ast.Call, _Scope]]] = defaultdict(list)
        for file, tree in trees.items():
            for node in [tree, *(each for each in ast.walk(tree) if isinstance(each, _Function))]:
                if isinstance(node, _Function):
                    self.functions[node.name].append(_Scope(file, node))
                for call in _own_calls(node):
                    self.calls[_called(call)].append((call, _Scope(file, node)))

    def texts(self, node: ast.expr | None, scope: _Scope, depth: int = 0) -> list[str]:
        """Return the texts that an expression can be; what is not known is `{the expression}` inside of others."""
        if node is None or depth > _DEPTH:
            return []
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, scope, depth) + self.texts(node.orelse, scope, depth)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value, scope, depth)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right], scope, depth)
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values, scope, depth)
        if isinstance(node, ast.Name):
            return self._named(node.id, scope, depth + 1)
        if isinstance(node, ast.Call):
            return self._returned(_called(node), scope, depth + 1)
        if isinstance(node, ast.Subscript):
            return self._of_table(node, scope, depth + 1)
        return []

    def _joined(self, parts: Sequence[ast.expr], scope: _Scope, depth: int) -> list[str]:
        """Return the texts of parts that follow each other; of a part that stands in braces only its name."""
        found = [""]
        for part in parts:
            if isinstance(part, ast.FormattedValue):
                texts = [f"{{{ast.unparse(part.value)}}}"]
            else:
                texts = self.texts(part, scope, depth) or [f"{{{ast.unparse(part)}}}"]
            found = [before + text for before in found for text in texts][:_MOST]
        return found if any(part != "" and not re.fullmatch(r"(\{[^}]*\}\s*)+", part) for part in found) else []

    def _named(self, name: str, scope: _Scope, depth: int) -> list[str]:
        values = [value for each in (scope.node, self.trees[scope.file]) for value in _values_of(name, each)]
        if isinstance(scope.node, _Function) and not values:
            for parameter in _parameters_of(scope.node):
                if parameter == name:
                    return self._passed(name, scope.node, depth)
        return [text for value in values for text in self.texts(value, scope, depth)]

    def _passed(self, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, depth: int) -> list[str]:
        """Return what calls give a function as a parameter."""
        names = _parameters_of(function)
        homes = {each.file for each in self.functions[function.name]}
        home = next(each.file for each in self.functions[function.name] if each.node is function)
        return [
            text
            for call, scope in self.calls[function.name]
            if len(homes) == 1 or scope.file == home
            for text in self.texts(_argument(call, names, name), scope, depth)
        ]

    def _returned(self, name: str, scope: _Scope, depth: int) -> list[str]:
        """Return what a function of that name returns: the one of this file, else the only one of the package."""
        known = self.functions.get(name, [])
        own = [each for each in known if each.file == scope.file]
        return [
            text
            for each in (own or known if len(own or known) == 1 else [])
            for node in _own_nodes(each.node)
            if isinstance(node, ast.Return)
            for text in self.texts(node.value, each, depth)
        ]

    def _of_table(self, node: ast.Subscript, scope: _Scope, depth: int) -> list[str]:
        """Return the values of a dict that a name stands for."""
        if not isinstance(node.value, ast.Name):
            return []
        tables = [value for each in (scope.node, self.trees[scope.file]) for value in _values_of(node.value.id, each)]
        values = [value for table in tables if isinstance(table, ast.Dict) for value in table.values]
        return [text for value in values for text in self.texts(value, scope, depth)]


def _parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _values_of(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """Yield what is assigned to a name in a function or module."""
    for node in _own_nodes(scope):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and value is not None:
            for target in targets:
                yield from _bound(target, value, name)


def _bound(target: ast.expr | None, value: ast.expr, name: str) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for inner, part in zip(target.elts, value.elts, strict=False):
            yield from _bound(inner, part, name)


if __name__ == "__main__":
    for reason, files in sorted(reasons().items()):
        print(reason, *sorted(files))
